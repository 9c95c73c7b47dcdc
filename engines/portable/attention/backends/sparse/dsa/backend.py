"""DSA attention: the tracer model over the positions that the indexer selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.portable.attention.backends.sparse.dsa.indexer import (
    Indexer,
    to_global,
    transform_local_topk_and_prepare_pool_view,
)
from engines.portable.attention.backends.trtllm import DRAFT_LAYER, TARGET_LAYER, TrtllmAttention
from engines.tracer import Cache, Rows, Selection, SparseTracer


class DSATrtllmAttention(TrtllmAttention):
    """Rows write an entry to both caches, select by the indexer's and read what they selected from the main one.

    Candidates come from the row's own sequence; the pages that they are read from come from the map from tokens to
    rows. Where that map is right, the two are the same request's.
    """

    tracer: SparseTracer

    def target(self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows: int64 [rows]."""
        tracer = self.tracer
        cache, keys = _caches(attn_metadata, TARGET_LAYER, table)
        tracer.target_cache, tracer.target_keys = cache, keys
        tracer.target_selected = Cache(cache.pool, attn_metadata.block_table[: attn_metadata.num_seqs])
        self._store(cache, keys, attn_metadata, rows, positions, tokens)
        chosen = tracer.select(keys, rows, Indexer.last_keys(attn_metadata, rows))
        chosen = self._skip_indexer(attn_metadata, rows, chosen, keys)
        slots = transform_local_topk_and_prepare_pool_view(chosen.tokens[:, 0], attn_metadata)
        return tracer.attend(cache.pool, chosen, slots)

    def shifted(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with shift 1, and what their own tokens add: two of int64 [rows]."""
        tracer = self.tracer
        cache, keys = _caches(attn_metadata, DRAFT_LAYER, table)
        self._store(cache, keys, attn_metadata, rows, positions, tokens)
        last = Indexer.last_keys(attn_metadata, rows)
        chosen = tracer.select_shifted(tracer.target_keys, keys, rows, last)
        chosen = self._skip_indexer(attn_metadata, rows, chosen, tracer.target_keys, keys)
        numbers = chosen.tokens.flatten(1)
        slots = self._target_slots(numbers, attn_metadata)
        slots_before = transform_local_topk_and_prepare_pool_view(numbers - 1, attn_metadata)
        return tracer.attend_shifted(tracer.target_cache.pool, cache.pool, chosen, slots, slots_before)

    def parallel(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor, masks: int
    ) -> Tensor:
        """Digests of draft rows without shift, up to ``masks`` masks at their end guessed: int64 [rows]."""
        tracer = self.tracer
        cache, keys = _caches(attn_metadata, DRAFT_LAYER, table)
        self._store(cache, keys, attn_metadata, rows, positions, tokens)
        seen, start, chosen = tracer.select_known((tracer.target_cache, cache), (tracer.target_keys, keys), rows)
        numbers = chosen.tokens[:, 0]
        slots = (
            self._target_slots(numbers, attn_metadata),
            transform_local_topk_and_prepare_pool_view(numbers, attn_metadata),
        )
        return tracer.attend_parallel((tracer.target_cache.pool, cache.pool), chosen, slots, seen, rows, start, masks)

    def _target_slots(self, numbers: Tensor, attn_metadata: Any) -> Tensor:
        """Where the target keeps tokens of the sequences that ``req_idx_per_token`` names."""
        selected = self.tracer.target_selected
        req_idx = attn_metadata.req_idx_per_token[: attn_metadata.num_tokens]
        return to_global(numbers, selected.table, req_idx, selected.pool.shape[1])

    def _skip_indexer(self, attn_metadata: Any, rows: Rows, chosen: Selection, *keys: Cache) -> Selection:
        """``chosen`` with what short sequences attend to instead: all of their tokens that were written.

        The second list of a row, if it has two, ends with its own token, the first one with the token after that.
        """
        contexts, tokens = attn_metadata.num_ctx_tokens, attn_metadata.num_tokens
        begin = 0 if attn_metadata.skip_indexer_for_ctx_reqs else contexts
        end = tokens if attn_metadata.skip_indexer_for_gen_reqs else contexts
        if begin == end:
            return chosen
        width = chosen.tokens.shape[2]
        lists = [attn_metadata.topk_indices_buffer[begin:end, :width].long()]
        if chosen.tokens.shape[1] == 2:
            after = (lists[0] >= 0).sum(1, keepdim=True)
            lists.insert(0, lists[0].scatter(1, after.clamp(max=width - 1), after))
        part = Rows(rows.sequence[begin:end], rows.index[begin:end])
        dense = self.tracer.written(part, torch.stack(lists, dim=1), *keys)
        return Selection(torch.cat([chosen.tokens[:begin], dense, chosen.tokens[end:]]), chosen.ranks)

    def _store(
        self, cache: Cache, keys: Cache, attn_metadata: Any, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> None:
        key_slots = attn_metadata.kv_cache_manager.get_indexer_slots(
            attn_metadata.slot_mapping_fp8[: attn_metadata.num_tokens]
        )
        self.tracer.store(cache, rows, keys.pool, key_slots, positions, tokens)


def _caches(attn_metadata: Any, layer: int, table: Tensor) -> tuple[Cache, Cache]:
    """The caches of a layer that the metadata refers to: the main one, with its table, and the indexer's."""
    manager = attn_metadata.kv_cache_manager
    key_table = attn_metadata.indexer_block_table()
    return Cache(manager.get_buffers(layer), table), Cache(manager.get_indexer_k_cache_buffers(layer), key_table)
