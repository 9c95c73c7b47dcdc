"""What a KV connector is told: which pages of the target's cache hold a request, and how much of it, to be saved."""

from __future__ import annotations

from collections.abc import Iterable

from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import KVCacheManager


class KvCacheConnector:
    """Page ids per request, as they were after its last step: pages that a rewind has freed are not among them."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._block_ids: dict[int, list[int]] = {}
        self._num_tokens: dict[int, int] = {}

    def get_block_ids(self, request_id: int) -> list[int]:
        """Ids of the pages of a request, in order; empty when nothing was told of it."""
        return self._block_ids.get(request_id, [])

    def get_num_tokens(self, request_id: int) -> int:
        """Tokens of a request whose KV may be saved; 0 when nothing was told of it."""
        return self._num_tokens.get(request_id, 0)

    def update(self, requests: Iterable[LlmRequest]) -> None:
        """Tell it of the pages that these requests have now (PR #16455: all of them, as a rewind takes some)."""
        for request in requests:
            self._block_ids[request.py_request_id] = list(self._manager.get_block_ids(request.py_request_id))
            self._num_tokens[request.py_request_id] = self._computed_tokens(request)

    def request_finished(self, request: LlmRequest) -> None:
        """Forget a request."""
        self._block_ids.pop(request.py_request_id, None)
        self._num_tokens.pop(request.py_request_id, None)

    @staticmethod
    def _computed_tokens(request: LlmRequest) -> int:
        """Tokens that are cached for good: none of a draft that was not accepted."""
        return request.num_cached_tokens
