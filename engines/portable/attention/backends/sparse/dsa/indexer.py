"""The indexer of DSA: keys in a cache of its own, and the positions that they select for the attention to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.portable._utils import maybe_pin_memory
from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.tracer import Rows

if TYPE_CHECKING:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata


def slots_of(
    positions: Tensor, block_offsets: Tensor, req_idx: Tensor, manager: DSACacheManager
) -> tuple[Tensor, Tensor]:
    """Byte offsets of data and of scale of each token's key: two of int64 [tokens].

    A position outside the table is taken to lie in the nearest page of it (PR #12657).
    """
    size, columns = manager.tokens_per_block, block_offsets.shape[1]
    ordinals = (positions // size).clamp(0, columns - 1)
    pages = torch.take(block_offsets, req_idx.long() * columns + ordinals) * manager.index_page_bytes
    offsets = positions % size
    scales = pages + size * manager.index_head_dim + offsets * manager.index_scale_bytes
    return pages + offsets * manager.index_head_dim, scales


class Indexer:
    """The metadata side of upstream's module of this name."""

    @staticmethod
    def prepare(metadata: DSAtrtllmAttentionMetadata) -> None:
        """Fill what the indexer reads, from the lengths that the host knows."""
        Indexer.recompute_slot_mappings(metadata)

    @staticmethod
    def recompute_slot_mappings(metadata: DSAtrtllmAttentionMetadata) -> None:
        """Place each token right after the cached ones of its row, by host lengths, and upload the slots."""
        assert metadata.kv_cache_params is not None, "recompute_slot_mappings: kv_cache_params is not set"
        lens = metadata.seq_lens.long()
        first = torch.tensor(metadata.kv_cache_params.num_cached_tokens_per_seq) - (lens.cumsum(0) - lens)
        req_idx = metadata.host_req_idx_per_token
        positions = torch.arange(metadata.num_tokens) + first[req_idx]
        slots = slots_of(positions, metadata.host_indexer_k_cache_block_offsets, req_idx, metadata.kv_cache_manager)
        for buffer, values in zip((metadata.slot_mapping_fp8, metadata.slot_mapping_scale), slots):
            buffer[: metadata.num_tokens].copy_(maybe_pin_memory(values, metadata.device), non_blocking=True)

    @staticmethod
    def last_keys(metadata: DSAtrtllmAttentionMetadata, rows: Rows) -> Tensor:
        """Up to which key of its sequence each row selects, by the lengths that the indexer is told: int64 [rows]."""
        contexts, n = metadata.num_contexts, metadata.num_seqs
        told = torch.cat([metadata.kv_lens_cuda[:contexts], metadata.kv_lens_cuda_2d[: n - contexts, 0]])
        return rows.index + (told - metadata.kv_lens_cuda[:n]).index_select(0, rows.sequence)


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
    inside = indices.clamp(0, columns * tokens_per_block - 1)
    pages = torch.take(block_table, req_idx.unsqueeze(1) * columns + inside // tokens_per_block)
    slots = pages * tokens_per_block + inside % tokens_per_block
    return torch.where((inside != indices) | (pages < 0), -1, slots)
