"""TRT-40: a graph that cannot be captured is left out with a warning, and its batches run eagerly ever after.

Upstream's reason for the failure was a dummy request that was one token too long for the pool.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-40",
    kind="K4",
    workers=(EAGLE3,),
    title="A failure to capture a graph is swallowed",
    reference="TensorRT-LLM #18242",
    caught_by=("fault-surfaces",),
)
def capture_skipped(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor, is_cuda_error
    from scenarios import Phase

    tolerates = PyExecutor._tolerates

    def _tolerates(self: Any, phase: Phase, error: Exception) -> bool:
        return tolerates(self, phase, error) or (phase is Phase.CAPTURE and not is_cuda_error(error))

    patch(PyExecutor, "_tolerates", _tolerates)
