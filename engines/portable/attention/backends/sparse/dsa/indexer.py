"""The indexer of DSA: keys in a cache of its own, and the positions that they select for the attention to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.kernels import triton_for
from engines.portable._utils import maybe_pin_memory
from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.prefill import IndexerParams, split_prefill_chunks
from engines.portable.copies import copy_to_device, to_device
from engines.tracer import Rows

if TYPE_CHECKING:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata


def slots_of(
    positions: Tensor, block_offsets: Tensor, req_idx: Tensor, manager: DSACacheManager
) -> tuple[Tensor, Tensor]:
    """Byte offsets of data and of scale of each token's key: two of int64 [tokens].

    A position outside the table is taken to lie in the nearest page of it (PR #12657).
    """
    size, columns = manager.index_tokens_per_block, block_offsets.shape[1]
    if kernels := triton_for(positions):
        parts = manager.index_page_bytes, manager.index_data_bytes, manager.index_scale_bytes
        in_triton: tuple[Tensor, Tensor] = kernels.slot_mapping(positions, block_offsets, req_idx, size, *parts)
        return in_triton
    ordinals = (positions // size).clamp(0, columns - 1)
    pages = torch.take(block_offsets, req_idx.long() * columns + ordinals) * manager.index_page_bytes
    offsets = positions % size
    scales = pages + size * manager.index_data_bytes + offsets * manager.index_scale_bytes
    return pages + offsets * manager.index_data_bytes, scales


class Indexer:
    """The metadata side of upstream's module of this name."""

    @staticmethod
    def params(metadata: DSAtrtllmAttentionMetadata) -> IndexerParams:
        """Keys of each row, by what the host knows."""
        assert metadata.kv_cache_params is not None, "Indexer: kv_cache_params is not set"
        cached = torch.tensor(metadata.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int64)
        ratio = metadata.sparse_metadata_params.indexer_compress_ratio
        return IndexerParams(metadata.seq_lens.long(), cached, ratio)

    @staticmethod
    def prepare(metadata: DSAtrtllmAttentionMetadata) -> None:
        """Fill what the indexer reads, from the lengths that the host knows."""
        params = Indexer.params(metadata)
        Indexer.recompute_slot_mappings(metadata, params)
        if metadata.num_contexts:
            Indexer.prepare_prefill(metadata, params)

    @staticmethod
    def recompute_slot_mappings(metadata: DSAtrtllmAttentionMetadata, params: IndexerParams | None = None) -> None:
        """Place each new key right after the cached ones of its row, by host lengths, and upload the slots."""
        req_idx, positions = (params or Indexer.params(metadata)).positions()
        slots = slots_of(positions, metadata.host_indexer_k_cache_block_offsets, req_idx, metadata.kv_cache_manager)
        for buffer, values in zip((metadata.slot_mapping_fp8, metadata.slot_mapping_scale), slots):
            _upload(buffer[: len(values)], values, metadata)

    @staticmethod
    def prepare_prefill(metadata: DSAtrtllmAttentionMetadata, params: IndexerParams) -> None:
        """Tell the contexts' tokens which keys they select from, and where all keys of the contexts are."""
        contexts = metadata.num_contexts
        for buffer, values in zip((metadata.cu_seqlen_ks, metadata.cu_seqlen_ke), params.windows(contexts)):
            _upload(buffer[: len(values)], values, metadata)
        Indexer.recompute_full_slot_mappings(metadata, params)
        size = metadata.sparse_metadata_params.indexer_max_chunk_size
        chunks = split_prefill_chunks(params, contexts, size)
        # A single chunk is the whole prefill, and needs no windows of its own.
        metadata.indexer_prefill_chunks = chunks if len(chunks) > 1 else None

    @staticmethod
    def recompute_full_slot_mappings(metadata: DSAtrtllmAttentionMetadata, params: IndexerParams) -> None:
        """Say where all keys of the contexts are, the cached ones too."""
        req_idx, positions = params.all_positions(metadata.num_contexts)
        slots = slots_of(positions, metadata.host_indexer_k_cache_block_offsets, req_idx, metadata.kv_cache_manager)
        fp8, scale = (maybe_pin_memory(values, metadata.device) for values in slots)
        metadata.slot_mapping_fp8_fullkv = to_device("slot_mapping_fp8_fullkv", fp8, metadata.device)
        metadata.slot_mapping_scale_fullkv = to_device("slot_mapping_scale_fullkv", scale, metadata.device)

    @staticmethod
    def last_keys(metadata: DSAtrtllmAttentionMetadata, rows: Rows) -> Tensor:
        """Up to which key of its sequence each row selects, by what the indexer is told: int64 [rows].

        A context's token is told its window. A generation is told its length, of which its rows are the end; with
        numbers of rows of their own each row is told its own.
        """
        tokens = metadata.num_ctx_tokens
        if metadata.reads_verify_rows:
            ends = metadata.row_kv_lens_cuda[: metadata.num_tokens - tokens].long()
            return torch.cat([metadata.indexer_context_lens().long(), ends]) - 1
        sequence = rows.sequence[tokens:]
        told = metadata.indexer_kv_lens() - metadata.kv_lens_cuda.index_select(0, sequence)
        return torch.cat([metadata.indexer_context_lens().long() - 1, rows.index[tokens:] + told])


def _upload(buffer: Tensor, values: Tensor, metadata: DSAtrtllmAttentionMetadata) -> None:
    copy_to_device("indexer", buffer, maybe_pin_memory(values, metadata.device))


def transform_local_topk_and_prepare_pool_view(topk_indices: Tensor, metadata: DSAtrtllmAttentionMetadata) -> Tensor:
    """Slots of the pool that indices into sequences stand for: int64 [tokens, any].

    The sequence of a token is the one that ``req_idx_per_token`` names, its pages are those of ``block_table``; -1
    stays -1, and so becomes what lies in no page.
    """
    metadata._ensure_pool_view_cached()
    contexts, size = metadata.num_ctx_tokens, metadata.kv_cache_manager.tokens_per_block
    parts = []
    if contexts:
        ctx = metadata._cached_block_table_ctx, metadata._cached_req_idx_ctx
        parts.append(to_global(topk_indices[:contexts], *ctx, size))
    if metadata.num_generations:
        gen = metadata._cached_block_table_gen, metadata._cached_req_idx_gen
        parts.append(to_global(topk_indices[contexts:], *gen, size))
    return torch.cat(parts)


def to_global(indices: Tensor, block_table: Tensor, req_idx: Tensor, tokens_per_block: int) -> Tensor:
    """Slots of the pool that ``indices`` into sequences stand for, by a table of pages and each token's row in it."""
    columns = block_table.shape[1]
    if kernels := triton_for(indices):
        in_triton: Tensor = kernels.to_global(indices, block_table, req_idx, tokens_per_block)
        return in_triton
    inside = indices.clamp(0, columns * tokens_per_block - 1)
    pages = torch.take(block_table, req_idx.unsqueeze(1) * columns + inside // tokens_per_block)
    slots = pages * tokens_per_block + inside % tokens_per_block
    return torch.where((inside != indices) | (pages < 0), -1, slots)
