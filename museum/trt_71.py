"""TRT-71: guided decoding laid its masks out for the largest draft length; a step of fewer drafts has fewer rows."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-71",
    kind="K8",
    workers=(EAGLE3, PARD),
    title="Masks are laid out for the largest draft length, not for that of the step",
    reference="TensorRT-LLM #15022, #15023",
    caught_by=("steps-complete",),
)
def rows_of_the_largest_draft_len(patch: Patch) -> None:
    from engines.portable.pyexecutor.guided_decoder import CapturableGuidedDecoder

    feed = CapturableGuidedDecoder.feed

    def _feed(self: Any, tokens: Any) -> None:
        feed(self, tokens)
        self._width = self._tokens.shape[1]

    patch(CapturableGuidedDecoder, "feed", _feed)
