"""VLL-12: a graph reads the tensors that it was captured with, whatever the step puts in their place."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, EAGLE3, PARD, Patch, bug


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

    def _upload(self: Any, name: str, values: list[int]) -> Any:
        return host_tensor(values, self.device).to(self.device, non_blocking=True)

    patch(PyTorchModelEngine, "_upload", _upload)


@bug(
    "VLL-12",
    kind="K10",
    workers=(DFLASH,),
    variant="slots",
    title="The map from rows to slots is a new tensor in each step, and a replayed graph reads that of its capture",
    reference="vLLM #44868",
    caught_by=("replay-equals-eager", "ctx-len-counts-committed", "draft-context-equals-cache"),
)
def new_map(patch: Patch) -> None:
    from engines.portable.speculative.dflash import DFlashSpecMetadata

    prepare_metadata = DFlashSpecMetadata.prepare

    def prepare(self: Any) -> None:
        self.batch_to_slot = self.batch_to_slot.clone()
        prepare_metadata(self)

    patch(DFlashSpecMetadata, "prepare", prepare)
