"""TRT-68: the pool of the drafter is outside what the executor keeps an eye on.

Upstream admits a request by the target's pool alone. Here scenarios admit by both, so what is seeded is the other half:
what one pool gives back the other keeps, until it is exhausted.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, MTP, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM #18660, #17347, #19006"


@bug(
    "TRT-68",
    kind="K7",
    workers=(EAGLE3, PARD),
    title="A failure gives back the pages of the target's pool alone",
    reference=_REFERENCE,
    caught_by=("kv-ledger-balanced", "kv-ledger-equals-reference"),
)
def failed_requests_kept(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor
    from engines.process import replaced

    handle = PyExecutor._handle_errors

    def _handle_errors(self: Any, *args: Any) -> Any:
        with replaced(self, "kv_cache_managers", self.kv_cache_managers[:1]):
            return handle(self, *args)

    patch(PyExecutor, "_handle_errors", _handle_errors)


@bug(
    "TRT-68",
    kind="K7",
    workers=(EAGLE3, PARD, MTP),
    variant="dummies",
    title="Dummies keep their pages in the drafter's pool",
    reference=_REFERENCE,
    caught_by=("kv-ledger-balanced", "kv-ledger-equals-reference"),
)
def dummies_kept(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TARGET_LAYER
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    free = KVCacheManager.free_resources

    def free_resources(self: Any, request: Any) -> None:
        if TARGET_LAYER in self.layer_offsets or not request.is_dummy:
            free(self, request)

    patch(KVCacheManager, "free_resources", free_resources)


@bug(
    "TRT-68",
    kind="K7",
    workers=(EAGLE3, PARD, EAGLE3_TREE),
    variant="rewind",
    title="What was not accepted is taken off the target's cache alone",
    reference=_REFERENCE,
    caught_by=("both-managers-hold-the-same-tokens", "kv-ledger-balanced", "kv-ledger-equals-reference"),
)
def rewound_in_one(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TARGET_LAYER
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    rewind = KVCacheManager.rewind_kv_cache

    def rewind_kv_cache(self: Any, *args: Any) -> None:
        if TARGET_LAYER in self.layer_offsets:
            rewind(self, *args)

    patch(KVCacheManager, "rewind_kv_cache", rewind_kv_cache)
