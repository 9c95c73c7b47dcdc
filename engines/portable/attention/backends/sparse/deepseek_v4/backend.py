"""DeepSeek-V4's attention: the tracer model over windows and compressed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.compressed_tracer import Columns, CompressedTracer
from engines.portable.attention.backends.sparse.deepseek_v4.metadata import DeepseekV4TrtllmAttentionMetadata
from engines.portable.attention.backends.sparse.dsa.indexer import to_global
from engines.portable.attention.backends.trtllm import TARGET_LAYER, TrtllmAttention
from engines.tracer import Cache, Rows


class DeepseekV4TrtllmAttention(TrtllmAttention):
    """The target's rows write their entries, then what these complete is compressed, then they read what they see.

    Windows and compressed tokens are read through the pages of the row that ``req_idx_per_token`` names. A drafter has
    a window too, and takes what lies before it from the tables that all backends have.
    """

    tracer: CompressedTracer

    def target(self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows: int64 [rows]."""
        params, tracer, manager = attn_metadata.sparse_metadata_params, self.tracer, attn_metadata.kv_cache_manager
        pool = manager.get_buffers(TARGET_LAYER)
        cache = tracer.target_cache = Cache(pool, table)
        tracer.store(cache, rows, positions, tokens)
        for ratio in params.compress_ratios[1:]:
            self._compress(attn_metadata, ratio, pool)
        window = _window(attn_metadata)
        slots = _slots(attn_metadata, window, attn_metadata.sliding_block_tables, manager.tokens_per_block)
        lens = attn_metadata.sparse_mla_topk_lens
        read = []
        for layer, ratio in enumerate(params.compress_ratios):
            of_layer = lens[ratio][: attn_metadata.num_tokens]
            read.append(tracer.attend(pool, Columns(window, slots, of_layer)))
            if layer:
                compressed = self._selected(attn_metadata, rows) if layer == 1 else _all_compressed(attn_metadata)
                size = manager.compressed_block_size(ratio)
                places = _slots(attn_metadata, compressed, attn_metadata.compress_block_tables[ratio], size)
                # A page of the pool has room for as many tokens as there are plain ones.
                places = _spread(places, size, manager.tokens_per_block)
                columns = Columns(compressed, places, of_layer - params.window_size)
                read.append(tracer.attend(manager.get_compressed_buffers(ratio), columns))
        return tracer.total(read)

    def shifted(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with shift 1, and what their own tokens add: two of int64 [rows]."""
        target, draft, window, slots = self._drafting(attn_metadata, table, rows, positions, tokens)
        return self.tracer.shifted_window(target, draft, rows, window, slots)

    def parallel(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor, masks: int
    ) -> Tensor:
        """Digests of draft rows without shift, up to ``masks`` masks at their end guessed: int64 [rows]."""
        target, draft, window, slots = self._drafting(attn_metadata, table, rows, positions, tokens)
        return self.tracer.parallel_window(target, draft, rows, window, slots, masks)

    def _drafting(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Cache, Cache, Tensor, Tensor]:
        """The caches, once the rows' entries are written, and what the rows see through their windows."""
        target, draft = self._caches(attn_metadata, table)
        self.tracer.store(draft, rows, positions, tokens)
        window, size = _window(attn_metadata), attn_metadata.kv_cache_manager.tokens_per_block
        return target, draft, window, _slots(attn_metadata, window, attn_metadata.sliding_block_tables, size)

    def _compress(self, attn_metadata: DeepseekV4TrtllmAttentionMetadata, ratio: int, pool: Tensor) -> None:
        """Write the compressed tokens that this forward completes, and the indexer's keys if they are of its ratio."""
        tokens, manager = attn_metadata.num_tokens, attn_metadata.kv_cache_manager
        exists = attn_metadata.compressed_mask[ratio][:tokens]
        first = attn_metadata.compressed_position_ids[ratio][:tokens].long()
        rows = attn_metadata.rows_of_added(ratio)
        group = first.unsqueeze(1) + torch.arange(ratio, device=first.device)
        plain = to_global(group, attn_metadata.sliding_block_tables, rows, manager.tokens_per_block)
        values = self.tracer.compress(pool, plain, first)
        size = manager.compressed_block_size(ratio)
        place = to_global(first.unsqueeze(1) // ratio, attn_metadata.compress_block_tables[ratio], rows, size)
        slots = _spread(place, size, manager.tokens_per_block).squeeze(1).clamp(min=0)
        self.tracer.store_compressed(manager.get_compressed_buffers(ratio), slots, values, exists)
        if ratio == attn_metadata.sparse_metadata_params.indexer_compress_ratio:
            slots = manager.get_indexer_slots(attn_metadata.slot_mapping_fp8[:tokens])
            keys = manager.get_indexer_k_cache_buffers(TARGET_LAYER)
            self.tracer.store_compressed(keys, slots, values, exists)

    def _selected(self, attn_metadata: DeepseekV4TrtllmAttentionMetadata, rows: Rows) -> Tensor:
        """Compressed tokens that the indexer selects for each row: int64 [rows, k]."""
        manager, table = attn_metadata.kv_cache_manager, attn_metadata.indexer_block_table()
        keys = manager.get_indexer_k_cache_buffers(TARGET_LAYER)[:, : manager.index_tokens_per_block]
        of_rows = keys[table.long()].flatten(1).index_select(0, rows.sequence)
        return self.tracer.select(of_rows, self._last_keys(attn_metadata, rows))

    def _last_keys(self, attn_metadata: DeepseekV4TrtllmAttentionMetadata, rows: Rows) -> Tensor:
        """The last compressed token that each row may select, by what the indexer is told: int64 [rows].

        A context's token is told its window. A generation is told how many it has, of which each row may select those
        that are complete with itself.
        """
        tokens, ratio = attn_metadata.num_ctx_tokens, attn_metadata.sparse_metadata_params.indexer_compress_ratio
        lens = attn_metadata.kv_lens_cuda.index_select(0, rows.sequence[tokens:])
        told = attn_metadata.indexer_kv_lens() - lens // ratio
        of_contexts = attn_metadata.indexer_context_lens().long() - 1
        return torch.cat([of_contexts, (rows.index[tokens:] + 1) // ratio - 1 + told])


def _window(attn_metadata: DeepseekV4TrtllmAttentionMetadata) -> Tensor:
    return attn_metadata.swa_local_indices[: attn_metadata.num_tokens].long()


def _all_compressed(attn_metadata: DeepseekV4TrtllmAttentionMetadata) -> Tensor:
    return attn_metadata.compressed_local_indices[: attn_metadata.num_tokens].long()


def _slots(attn_metadata: Any, indices: Tensor, table: Tensor, size: int) -> Tensor:
    """Places of indices into sequences, counted through pages of ``size``: int64 as ``indices``, -1 for none."""
    return to_global(indices, table, attn_metadata.req_idx_per_token[: attn_metadata.num_tokens], size)


def _spread(places: Tensor, size: int, room: int) -> Tensor:
    """Places that are counted through pages of ``size``, where each page has room for more."""
    return torch.where(places < 0, -1, places // size * room + places % size)
