"""TRT-30: a position follows from a count of the host, which is a step behind, and repeats."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, MTP, PARD, Patch, bug


@bug(
    "TRT-30",
    kind="K3",
    workers=(EAGLE3, PARD, MTP, EAGLE3_TREE),
    title="Positions of requests in flight stay where the host took them to be",
    reference="TensorRT-LLM #17811",
    caught_by=("positions-are-corrected", "overlap-equals-reference", "overlap-equals-no-overlap"),
)
def positions_of_the_host(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    correct = OverlapInputs.correct

    def lengths_alone(self: Any, inputs: dict[str, Any]) -> None:
        correct(self, inputs)
        self.take_back(inputs)

    patch(OverlapInputs, "correct", lengths_alone)
