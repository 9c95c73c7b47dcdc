"""DSA attention: the tracer model over the positions that the indexer selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.portable.attention.backends.sparse.dsa.indexer import Indexer, transform_local_topk_and_prepare_pool_view
from engines.portable.attention.backends.trtllm import DRAFT_LAYER, TARGET_LAYER, TrtllmAttention
from engines.tracer import Rows, Selection, SparseTracer


class DSATrtllmAttention(TrtllmAttention):
    """Rows write an entry to both caches, select by the indexer's and read what they selected from the main one.

    Candidates come from the row's own sequence; the pages that they are read from come from the map from tokens to
    rows. Where that map is right, the two are the same request's.
    """

    tracer: SparseTracer

    def target(self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows: int64 [rows]."""
        pool, key_pool = _pools(attn_metadata, TARGET_LAYER)
        self._store(TARGET_LAYER, attn_metadata, table, rows, positions, tokens)
        last = Indexer.last_keys(attn_metadata, rows)
        chosen = self.tracer.select(key_pool, attn_metadata.indexer_block_table(), rows, last)
        chosen = self._skip_indexer(attn_metadata, rows, chosen, key_pool)
        slots = transform_local_topk_and_prepare_pool_view(chosen.tokens[:, 0], attn_metadata)
        return self.tracer.attend(pool, chosen, slots)

    def shifted(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with shift 1, and what their own tokens add: two of int64 [rows]."""
        pools, key_pools = _both_pools(attn_metadata)
        self._store(DRAFT_LAYER, attn_metadata, table, rows, positions, tokens)
        last = Indexer.last_keys(attn_metadata, rows)
        chosen = self.tracer.select_shifted(*key_pools, attn_metadata.indexer_block_table(), rows, last)
        chosen = self._skip_indexer(attn_metadata, rows, chosen, *key_pools)
        numbers = chosen.tokens.flatten(1)
        both = transform_local_topk_and_prepare_pool_view(torch.cat([numbers, numbers - 1], dim=1), attn_metadata)
        return self.tracer.attend_shifted(*pools, chosen, *both.chunk(2, dim=1))

    def parallel(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor, masks: int
    ) -> Tensor:
        """Digests of draft rows without shift, up to ``masks`` masks at their end guessed: int64 [rows]."""
        pools, key_pools = _both_pools(attn_metadata)
        self._store(DRAFT_LAYER, attn_metadata, table, rows, positions, tokens)
        key_table = attn_metadata.indexer_block_table()
        seen, start, chosen = self.tracer.select_known(pools, table, key_pools, key_table, rows)
        slots = transform_local_topk_and_prepare_pool_view(chosen.tokens[:, 0], attn_metadata)
        return self.tracer.attend_parallel(*pools, chosen, slots, seen, rows, start, masks)

    def _skip_indexer(self, attn_metadata: Any, rows: Rows, chosen: Selection, *key_pools: Tensor) -> Selection:
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
        dense = self.tracer.written(attn_metadata.indexer_block_table(), part, torch.stack(lists, dim=1), *key_pools)
        return Selection(torch.cat([chosen.tokens[:begin], dense, chosen.tokens[end:]]), chosen.ranks)

    def _store(
        self, layer: int, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> None:
        pool, key_pool = _pools(attn_metadata, layer)
        key_slots = attn_metadata.kv_cache_manager.get_indexer_slots(
            attn_metadata.slot_mapping_fp8[: attn_metadata.num_tokens]
        )
        self.tracer.store(pool, table, rows, key_pool, key_slots, positions, tokens)


def _pools(attn_metadata: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Pools of a layer, the main one and the indexer's."""
    manager = attn_metadata.kv_cache_manager
    return manager.get_buffers(layer), manager.get_indexer_k_cache_buffers(layer)


def _both_pools(attn_metadata: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Main pools of target and drafter, and their indexers'."""
    (target, target_keys), (draft, draft_keys) = (_pools(attn_metadata, layer) for layer in (TARGET_LAYER, DRAFT_LAYER))
    return (target, draft), (target_keys, draft_keys)
