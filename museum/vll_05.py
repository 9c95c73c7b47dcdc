"""VLL-05: a step is launched before the token that it starts from has come back, and starts from token 0."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP, PARD, Patch, bug


@bug(
    "VLL-05",
    kind="K3",
    workers=(EAGLE3, PARD, MTP),
    title="A request in flight is fed a placeholder in place of its last accepted token",
    reference="vLLM #52071, #52179",
    caught_by=("inputs-equal-reference", "overlap-equals-no-overlap"),
)
def anchor_missing(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    prepare = OverlapInputs.prepare

    def prepare_drafts(self: Any, generations: Any, width: int, *args: Any) -> None:
        first = args[-2].view(len(generations), width)[:, 0]
        placeholders = first.clone()
        prepare(self, generations, width, *args)
        first.copy_(placeholders)

    patch(OverlapInputs, "prepare", prepare_drafts)
