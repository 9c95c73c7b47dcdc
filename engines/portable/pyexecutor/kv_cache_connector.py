"""What a KV connector is told: which pages of the target's cache hold a request, for whoever transfers them."""

from __future__ import annotations

from collections.abc import Iterable

from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import KVCacheManager


class KvCacheConnector:
    """Page ids per request, as they were after its last step: pages that a rewind has freed are not among them."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._block_ids: dict[int, list[int]] = {}

    def get_block_ids(self, request_id: int) -> list[int]:
        """Ids of the pages of a request, in order; empty when nothing was told of it."""
        return self._block_ids.get(request_id, [])

    def update(self, requests: Iterable[LlmRequest]) -> None:
        """Tell it of the pages that these requests have now (PR #16455: all of them, as a rewind takes some)."""
        for request in requests:
            self._block_ids[request.py_request_id] = list(self._manager.get_block_ids(request.py_request_id))

    def request_finished(self, request: LlmRequest) -> None:
        """Forget a request."""
        self._block_ids.pop(request.py_request_id, None)
