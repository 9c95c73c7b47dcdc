"""TRT-66: what one manager reuses moves the request on, and the other takes its first chunk for a later one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM #5448"


@bug(
    "TRT-66",
    kind="K7",
    workers=(EAGLE3, PARD, EAGLE3_TREE),
    title="The drafter's manager grants nothing to a prompt of which the target has reused a part",
    reference=_REFERENCE,
    caught_by=("both-managers-hold-the-same-tokens", "kv-ledger-balanced", "block-reuse-equals-no-reuse"),
)
def nothing_granted(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TARGET_LAYER
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    prepare = KVCacheManager.prepare_resources

    def prepare_resources(self: Any, batch: Any) -> None:
        if TARGET_LAYER not in self.layer_offsets:
            first = tuple(r for r in batch.context_requests if not r.context_current_position)
            batch = replace(batch, context_requests=first)
        prepare(self, batch)

    patch(KVCacheManager, "prepare_resources", prepare_resources)
