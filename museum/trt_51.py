"""TRT-51: padding is told by a missing row in the step before, and the dummy is the same object in all steps."""

from __future__ import annotations

from museum.bug import EAGLE3, MTP, PARD, SA, Patch, bug


@bug(
    "TRT-51",
    kind="K5",
    workers=(EAGLE3, MTP, PARD, SA),
    title="A dummy that the step before had, too, goes on from its row there",
    reference="TensorRT-LLM #4853, #5058",
    caught_by=("corrections-follow-last-step",),
)
def told_by_a_missing_row(patch: Patch) -> None:
    from engines.portable.pyexecutor.llm_request import LlmRequest

    patch(LlmRequest, "previous_row", property(lambda self: self.py_batch_idx))
