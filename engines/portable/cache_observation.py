"""What the observer reads of the KV caches: tables of the metadata, ledgers of the managers, and what pools hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from engines.portable.compressed_observation import compressed_content
from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.py_executor import PyExecutor
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from scenarios import Config

IDENTITY: Final = ("kv_cache_manager", "kv_cache_block_offsets", "draft_kv_cache_block_offsets")
"""Fields of the metadata that refer to something of one cache."""
CONTENT: Final = ("target_kv", "draft_kv", "target_indexer_kv", "draft_indexer_kv")
"""What the pools hold, in order; a dense backend has the first two, vanilla MTP others."""

Fields = dict[str, Any]


class Committed(Protocol):
    """A request, and how many of its tokens are in the cache."""

    @property
    def py_request_id(self) -> int:
        """Its id."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose entries are to be read."""
        ...


class CacheObserver:
    """Reads one KV cache, or the target's and the drafter's; ``begin`` when the metadata is prepared for a batch."""

    def __init__(self, config: Config, executor: PyExecutor) -> None:
        self._config = config
        self._executor = executor
        self._managers = [("", executor.kv_cache_manager)]
        if executor.draft_kv_cache_manager is not None:
            self._managers.append(("draft_", executor.draft_kv_cache_manager))
        self._pages: dict[str, list[int]] = {}

    def begin(self, batch: Sequence[LlmRequest]) -> Fields:
        """What the managers call the pages of each row, and with host offload where they say that these are."""
        fields: Fields = {}
        for prefix, manager in self._managers:
            ids = [list(manager.get_block_ids(request.py_request_id)) for request in batch]
            self._pages[prefix] = [len(pages) for pages in ids]
            fields[f"{prefix}block_ids_per_seq"] = ids
            if self._config.host_offload:
                indices = [manager.get_memory_pool_indices(request.py_request_id) for request in batch]
                fields[f"{prefix}kv_pool_indices"] = indices
        return fields

    def referred(self, attn: Any) -> Fields:
        """Whose manager the metadata refers to."""
        return {"kv_cache_manager": "draft" if self._prefix(attn) else "target"}

    def tables(self, attn: Any, *, drafting: bool = False) -> Fields:
        """The table that the metadata refers to and, unless ``drafting``, that of a separate draft KV cache."""
        if not hasattr(attn, "kv_cache_block_offsets"):
            return {}
        fields = {"kv_cache_block_offsets": self._table(attn.kv_cache_block_offsets, self._prefix(attn))}
        if len(self._managers) > 1 and not drafting:
            fields["draft_kv_cache_block_offsets"] = self._table(attn.draft_kv_cache_block_offsets, "draft_")
        return fields

    def ledger(self) -> Fields:
        """What each manager has granted, of the active requests and those in flight."""
        requests = self._executor.held_requests
        fields: Fields = {}
        for prefix, manager in self._managers:
            fields |= {
                f"{prefix}kv_tokens": {i: manager.get_num_tokens(i) for i in requests},
                f"{prefix}kv_blocks": {i: list(manager.get_block_ids(i)) for i in requests},
                f"{prefix}free_blocks": manager.get_num_free_blocks(),
            }
        return fields

    def connector(self) -> Fields:
        """What a connector was told, of the active requests."""
        told, requests = self._executor.kv_connector, self._executor.active_requests
        fields = {"connector_block_ids": {i: told.get_block_ids(i) for i in requests}}
        if self._config.overlap:
            # With a step in flight the count that the host tells belongs to neither step.
            return fields
        return {**fields, "connector_num_tokens": {i: told.get_num_tokens(i) for i in requests}}

    def content(self, requests: Iterable[Committed]) -> Fields:
        """Entries of the committed slots of each request, in every pool."""
        used = {r.py_request_id: r.num_cached_tokens for r in requests}
        if self._config.compress_ratios:
            return self._compressed_content(used)
        of_managers = [_content(manager, used) for _, manager in self._managers]
        if self._config.index_topk and len(of_managers) > 1:
            # Each has its layers and then those of their indexers.
            of_managers = list(zip(*of_managers))
        content = [pool for pools in of_managers for pool in pools]
        if self._config.worker == "MTPWorker":
            target, *layers = content
            return {"target_kv": target, "draft_layers_kv": {i: [layer[i] for layer in layers] for i in used}}
        return dict(zip(CONTENT, content))

    def _compressed_content(self, used: Mapping[int, int]) -> Fields:
        # Behind the pools of plain tokens come the others.
        target, *rest = (pool for _, manager in self._managers for pool in _content(manager, used))
        drafts = rest[0] if len(self._managers) == 1 else rest[-1]
        manager: Any = self._executor.kv_cache_manager
        return {"target_kv": target, "draft_kv": drafts, **compressed_content(manager, used)}

    def _prefix(self, attn: Any) -> str:
        """Of the fields that speak of the cache that the metadata refers to."""
        draft = self._executor.draft_kv_cache_manager
        return "draft_" if draft is not None and attn.kv_cache_manager is draft else ""

    def _table(self, table: torch.Tensor, prefix: str) -> list[list[int]]:
        pages = self._pages[prefix]
        return [row[:n] for row, n in zip(table[0, : len(pages), 0].tolist(), pages)]


def _content(manager: KVCacheManager, used: Mapping[int, int]) -> Sequence[dict[int, list[int]]]:
    """For each pool of a manager the slots that each request has used; ``used`` says how many. Read in one go."""
    size = manager.tokens_per_block
    blocks = {i: manager.get_memory_pool_indices(i)[: -(-tokens // size)] for i, tokens in used.items()}
    pages = torch.tensor([b for owned in blocks.values() for b in owned], dtype=torch.int64, device=manager.device)
    pools = manager.kv_cache_pools.index_select(1, pages).flatten(1).tolist()
    content: list[dict[int, list[int]]] = [{} for _ in pools]
    begin = 0
    for i, tokens in used.items():
        for slots, kept in zip(pools, content):
            kept[i] = slots[begin : begin + tokens]
        begin += len(blocks[i]) * size
    return content
