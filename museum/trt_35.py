"""TRT-35: a request ends before the rewind of its last step is applied."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-35",
    kind="K3",
    workers=(EAGLE3,),
    title="The KV cache of a request that ends is freed before what it did not accept is rewound",
    reference="TensorRT-LLM #9693",
    caught_by=("steps-complete",),
)
def freed_before_rewound(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    forward_step = PyExecutor._forward_step

    def _forward_step(self: Any, iteration: Any) -> Any:
        error = forward_step(self, iteration)
        if error is None:
            self._free(iteration.finished)
        return error

    patch(PyExecutor, "_forward_step", _forward_step)
