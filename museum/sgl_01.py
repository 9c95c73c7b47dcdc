"""SGL-01: what was allocated for drafts is not recorded, so what they did not use is not freed."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "SGL-01",
    kind="K4",
    workers=(EAGLE3, PARD),
    title="Pages that a rewind gives up do not return to the pool",
    reference="SGLang #13826, #31616",
    caught_by=("kv-ledger-balanced", "kv-ledger-equals-reference", "startup-leaves-no-trace"),
)
def pages_stranded(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    def rewind_kv_cache(self: Any, request: Any, rewind_len: int) -> None:
        request_id = request.py_request_id
        self._num_tokens[request_id] -= rewind_len
        del self._block_ids[request_id][self._blocks(self._num_tokens[request_id]) :]

    patch(KVCacheManager, "rewind_kv_cache", rewind_kv_cache)
