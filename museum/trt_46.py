"""TRT-46: batches for which graphs are captured are larger than what some buffer was sized for."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, EAGLE3, PARD, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #10688, #10687, #18600, #18910"


@bug(
    "TRT-46",
    kind="K4",
    workers=(EAGLE3, PARD, SA, DFLASH),
    title="The worker's buffers are sized for one row fewer than a batch may have",
    reference=_REFERENCE,
    caught_by=("steps-complete",),
)
def worker_one_row_short(patch: Patch) -> None:
    from engines.portable.pyexecutor import py_executor_creator
    from engines.portable.speculative.drafter import Setting

    def one_row_short(**options: Any) -> Any:
        return Setting(**options | {"max_num_requests": max(1, options["max_num_requests"] - 1)})

    patch(py_executor_creator, "Setting", one_row_short)
