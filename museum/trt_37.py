"""TRT-37: a length contains the width of the verified rows, and the correction for it is not applied exactly once.

Before its first forward a tree drafter takes off what the tree had more rows than the longest path of it has.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3_TREE, MTP_EAGLE_TREE, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"


def _correct(patch: Patch, times: int) -> None:
    from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker

    initialise = Eagle3OneModelDynamicTreeWorker.__init__

    def __init__(self: Any, spec_config: Any) -> None:
        initialise(self, spec_config)
        self._kv_correction *= times

    patch(Eagle3OneModelDynamicTreeWorker, "__init__", __init__)


@bug(
    "TRT-37",
    kind="K3",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    title="The drafter's KV lengths count the rows of the whole tree and not those of a path",
    reference=_REFERENCE,
    caught_by=("kv-lens-equals-reference", "drafts-equal-reference"),
)
def never_corrected(patch: Patch) -> None:
    _correct(patch, 0)


@bug(
    "TRT-37",
    kind="K3",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="twice",
    title="The rows that a tree has more than a path are taken off the KV lengths twice",
    reference=_REFERENCE,
    caught_by=("kv-lens-equals-reference", "drafts-equal-reference"),
)
def corrected_twice(patch: Patch) -> None:
    _correct(patch, 2)
