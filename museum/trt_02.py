"""TRT-02: what a worker keeps for itself is not in the generic list of what a failed forward puts back."""

from __future__ import annotations

from museum.bug import DFLASH, DSPARK, Patch, bug


@bug(
    "TRT-02",
    kind="K2",
    workers=(DFLASH, DSPARK),
    title="A forward that fails leaves the lengths of the drafter's contexts advanced",
    reference="TensorRT-LLM #16382",
    caught_by=("ctx-len-rolled-back",),
)
def lengths_stay_advanced(patch: Patch) -> None:
    from engines.portable.speculative.dflash import DFlashWorker
    from engines.portable.speculative.parallel import ParallelSpecWorker

    patch(DFlashWorker, "_ensure_spec_dec_state_restored", ParallelSpecWorker._ensure_spec_dec_state_restored)
