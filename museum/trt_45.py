"""TRT-45: the speculative tail of a request is trimmed from the wrong end (the second half of the entry)."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-45",
    kind="K4",
    workers=(EAGLE3, PARD),
    title="A rewind gives up the first pages of a request and keeps its uninitialised last ones",
    reference="TensorRT-LLM #17619",
    caught_by=("tables-name-owned-pages", "kv-content-equals-reference"),
)
def trimmed_from_the_front(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    def rewind_kv_cache(self: Any, request: Any, rewind_len: int) -> None:
        request_id = request.py_request_id
        self._num_tokens[request_id] -= rewind_len
        blocks = self._block_ids[request_id]
        while len(blocks) > self._blocks(self._num_tokens[request_id]):
            self._free_blocks.append(blocks.pop(0))

    patch(KVCacheManager, "rewind_kv_cache", rewind_kv_cache)
