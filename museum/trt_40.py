"""TRT-40: a graph that cannot be captured is left out with a warning, and its batches run eagerly ever after.

Upstream's reason for the failure was a dummy request that was one token too long for the pool.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP, SA, Patch, bug


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


@bug(
    "TRT-40",
    kind="K2",
    workers=(EAGLE3, SA),
    variant="budget",
    title="Failed steps do not use up the error budget, which lasts for ever",
    reference="TensorRT-LLM, no public number",
    caught_by=("fault-surfaces",),
)
def budget_never_ends(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor

    handle = PyExecutor._handle_errors

    def _handle_errors(self: Any, iteration: Any, error: Exception) -> str:
        left = self._errors_left
        outcome = handle(self, iteration, error)
        self._errors_left = left
        return outcome

    patch(PyExecutor, "_handle_errors", _handle_errors)


@bug(
    "TRT-40",
    kind="K2",
    workers=(EAGLE3, MTP),
    variant="start-up",
    title="A failure that general warm-up survives is taken off the error budget of serving",
    reference="TensorRT-LLM, no public number",
    caught_by=("fault-surfaces",),
)
def start_up_counts(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor
    from scenarios import Phase

    handle = PyExecutor._handle_errors

    def _handle_errors(self: Any, iteration: Any, error: Exception) -> str:
        outcome = handle(self, iteration, error)
        self._errors_left -= iteration.phase is Phase.WARMUP
        return outcome

    patch(PyExecutor, "_handle_errors", _handle_errors)
