"""TRT-10: a flag that says whether what is stored may be used is cleared too late.

Upstream's flag was that of draft probabilities. Here it is that of draft trees, and of what a slot holds with it.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3_TREE, MTP_EAGLE_TREE, Patch, bug


@bug(
    "TRT-10",
    kind="K2",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    title="A slot still holds the tree of its last owner when a request is granted it",
    reference="TensorRT-LLM #15775",
    caught_by=("draft-tree-well-formed", "inputs-equal-reference"),
)
def tree_outlives_its_owner(patch: Patch) -> None:
    from engines.portable.speculative.spec_tree_manager import DynamicTreeSlotStorage

    def mark_invalid(self: Any, slots: Any) -> None:
        pass

    patch(DynamicTreeSlotStorage, "mark_invalid", mark_invalid)
