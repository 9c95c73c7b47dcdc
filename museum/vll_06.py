"""VLL-06: only the last rank of a pipeline knows what was accepted and drafted; the positions of the others drift."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, SA, Patch, bug

_REFERENCE = "vLLM #44697, #44698, #52295"


@bug(
    "VLL-06",
    kind="K9",
    workers=(EAGLE3, PARD, SA),
    title="A rank of a pipeline that is not the last counts one accepted token per request",
    reference=_REFERENCE,
    caught_by=("pipeline-ranks-prepare-the-same",),
)
def counts_not_told(patch: Patch) -> None:
    from engines.portable.pyexecutor.pipeline import PPRelay

    receive = PPRelay.receive

    def without_counts(self: Any, placeholders: dict[str, Any]) -> dict[str, Any]:
        return {**receive(self, placeholders), "new_tokens_lens": placeholders["new_tokens_lens"]}

    patch(PPRelay, "receive", without_counts)


@bug(
    "VLL-06",
    kind="K9",
    workers=(EAGLE3, PARD),
    variant="drafts",
    title="A rank of a pipeline that is not the last verifies zeros in place of the drafts",
    reference=_REFERENCE,
    caught_by=("pipeline-ranks-prepare-the-same",),
)
def drafts_not_told(patch: Patch) -> None:
    from engines.portable.pyexecutor.pipeline import PPRelay

    receive = PPRelay.receive

    def without_drafts(self: Any, placeholders: dict[str, Any]) -> dict[str, Any]:
        told = receive(self, placeholders)
        drafts, tokens = told["next_draft_tokens"], told["next_new_tokens"].clone()
        tokens[:, 1:] = 0
        return {**told, "next_draft_tokens": drafts.new_zeros(drafts.shape), "next_new_tokens": tokens}

    patch(PPRelay, "receive", without_drafts)


@bug(
    "VLL-06",
    kind="K9",
    workers=(EAGLE3,),
    variant="late",
    title="A rank of a pipeline that is not the last is told of a step what the last rank returned for the one before",
    reference=_REFERENCE,
    caught_by=("pipeline-ranks-prepare-the-same",),
)
def told_a_step_late(patch: Patch) -> None:
    from engines.portable.pyexecutor.pipeline import PPRelay

    receive = PPRelay.receive

    def late(self: Any, placeholders: dict[str, Any]) -> dict[str, Any]:
        told = receive(self, placeholders)
        before = vars(self).get("_before", told)
        self._before = told
        alike = all(before[name].shape == told[name].shape for name in before)
        return {**placeholders, **(before if alike else told)}

    patch(PPRelay, "receive", late)
