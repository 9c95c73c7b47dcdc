"""TRT-54: slots run out, as more requests have one than a batch has rows."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, MTP, SA, Patch, bug


@bug(
    "TRT-54",
    kind="K5",
    workers=(MTP, SA, DFLASH),
    title="There is a slot for each row of a batch, and none for requests that it leaves out, nor for padding",
    reference="TensorRT-LLM #7998",
    caught_by=("steps-complete",),
)
def slots_of_one_batch(patch: Patch) -> None:
    from engines.portable.pyexecutor import py_executor_creator
    from engines.portable.speculative.drafter import Setting

    def slots_of_rows(**options: Any) -> Any:
        return Setting(**options | {"num_slots": options["max_num_requests"]})

    patch(py_executor_creator, "Setting", slots_of_rows)
