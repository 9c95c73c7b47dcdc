"""``KVCacheManagerV2``: capacities that are resized, and a table of pages that is kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from engines.portable._utils import maybe_pin_memory
from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import KVCacheManager, SlotManager

BAD_PAGE_INDEX: Final = -1
"""What the table holds behind the pages of a request."""


class KVCacheManagerV2(KVCacheManager):
    """Grants and takes back as its base; each request has a row of the table from its first page to its last.

    host_kv_cache_block_offsets  int32 [rows, max_blocks_per_seq], host: ids of the pages of each request. A row is
        written when it is granted and when the request's capacity changes; nothing initialises the others
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Who is served owns a page at least. One row more is for a request that is refused its first page.
        rows = self.num_blocks + 1
        self._index_mapper = SlotManager(rows)
        host_table = torch.empty(rows, self.max_blocks_per_seq, dtype=torch.int32)
        self.host_kv_cache_block_offsets = maybe_pin_memory(host_table, self.device)

    def resize(self, request: LlmRequest, capacity: int) -> list[int]:
        """Let a request have ``capacity`` tokens, and its row name the pages that it then owns; returns the new ones.

        Raises ``RuntimeError`` when the pool is exhausted.
        """
        request_id = request.py_request_id
        if self._index_mapper.get_slot(request_id) is None:
            self._index_mapper.add_slot(request_id)
        grown = capacity - self.get_num_tokens(request_id)
        granted: list[int] = []
        if grown >= 0:
            granted = super()._add_tokens(request, grown)
        else:
            super().rewind_kv_cache(request, -grown)
        self._write_row(request_id)
        return granted

    def rewind_kv_cache(self, request: LlmRequest, rewind_len: int) -> None:
        """Shrink the capacity of a request by ``rewind_len`` tokens, and give back the pages not needed then."""
        self.resize(request, self.get_num_tokens(request.py_request_id) - rewind_len)

    def free_resources(self, request: LlmRequest) -> None:
        """Take everything back, the row included; does nothing for a request that owns nothing."""
        super().free_resources(request)
        self._index_mapper.remove_slot(request.py_request_id)

    def get_block_table(self, request_ids: Sequence[int]) -> torch.Tensor:
        """Where the pages of each request lie, in order: int32 [n, max_blocks_per_seq], host.

        Columns after a request's pages are ``BAD_PAGE_INDEX``.
        """
        rows = self.host_kv_cache_block_offsets[self._index_mapper.get_slots(request_ids)]
        if self._offloading is not None:
            rows.apply_(self._memory_pool_index)
        return maybe_pin_memory(rows, self.device)

    def _add_tokens(self, request: LlmRequest, num_tokens: int) -> list[int]:
        return self.resize(request, self.get_num_tokens(request.py_request_id) + num_tokens)

    def _write_row(self, request_id: int) -> None:
        columns = self.max_blocks_per_seq
        row = (self.get_block_ids(request_id) + [BAD_PAGE_INDEX] * columns)[:columns]
        self.host_kv_cache_block_offsets[self._index_mapper.get_slots([request_id])] = torch.tensor(
            row, dtype=torch.int32
        )

    def _memory_pool_index(self, block_id: int) -> int:
        return block_id if block_id == BAD_PAGE_INDEX else self._memory_pool_indices([block_id])[0]
