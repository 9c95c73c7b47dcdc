"""TRT-121: dummies that keep the ranks in step are not what they have to be. An entry of this suite's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"


@bug(
    "TRT-121",
    kind="K5",
    workers=(EAGLE3, PARD),
    title="A dummy that pads a served batch keeps its pages",
    reference=_REFERENCE,
    caught_by=("kv-ledger-equals-reference", "other-ranks-do-not-matter", "padded-equals-unpadded"),
)
def dummies_keep_their_pages(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    free = KVCacheManager.free_resources

    def free_resources(self: Any, request: Any) -> None:
        # Of start-up's only those are kept that have as little cached as these.
        if not request.is_dummy or len(request.prompt):
            free(self, request)

    patch(KVCacheManager, "free_resources", free_resources)


@bug(
    "TRT-121",
    kind="K5",
    workers=(EAGLE3, MTP_EAGLE),
    variant="first",
    title="Dummies that pad a graph come before the requests, so that each has the row of another",
    reference=_REFERENCE,
    caught_by=("layout-equals-reference",),
)
def dummies_come_first(patch: Patch) -> None:
    from engines.portable.pyexecutor.attention_dp import AttentionDPPadding

    pad = AttentionDPPadding.pad

    def pad_in_front(self: Any, batch: Any, draft_len: int, *, use_cuda_graph: bool) -> Any:
        padded = pad(self, batch, draft_len, use_cuda_graph=use_cuda_graph)
        first = len(batch.generation_requests)
        rows = padded.generation_requests
        return replace(padded, generation_requests=(*rows[first:], *rows[:first]))

    patch(AttentionDPPadding, "pad", pad_in_front)
