"""VLL-04: drafts that stand in for those of the step in flight are verified in their place."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, SA, Patch, bug


@bug(
    "VLL-04",
    kind="K3",
    workers=(EAGLE3, DRAFT_TARGET, SA, EAGLE3_TREE),
    title="Of a request in flight the drafts that the host has are verified, older ones or none",
    reference="vLLM #46899, #40768",
    caught_by=("inputs-equal-reference", "drafts-carried-over"),
)
def drafts_of_the_host(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    prepare = OverlapInputs.prepare

    def prepare_tokens(self: Any, generations: Any, width: int, *args: Any) -> None:
        *_, input_ids, draft_tokens = args
        placeholders = draft_tokens.clone()
        prepare(self, generations, width, *args)
        draft_tokens.copy_(placeholders)
        input_ids.view(len(generations), width)[:, 1:].copy_(placeholders.view(len(generations), width - 1))

    patch(OverlapInputs, "prepare", prepare_tokens)
