"""VLL-12: a graph reads the tensors that it was captured with, whatever the step puts in their place."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "VLL-12",
    kind="K10",
    workers=(EAGLE3, PARD),
    title="Inputs go to new tensors in each step, and a replayed graph reads those of its capture",
    reference="vLLM #44868",
    caught_by=("replay-equals-eager", "acceptance-follows-agreement", "acceptance-equals-reference"),
)
def new_tensors(patch: Patch) -> None:
    from engines.portable._utils import host_tensor
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    def _upload(self: Any, values: list[int], buffer: Any) -> Any:
        return host_tensor(values, self.device).to(self.device, non_blocking=True)

    patch(PyTorchModelEngine, "_upload", _upload)
