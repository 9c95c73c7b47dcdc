"""TRT-29: trees whose nodes are told apart by where they stand, as if each tree were a bundle of chains."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3_TREE, MTP_EAGLE_TREE, Patch, bug

_REFERENCE = "TensorRT-LLM #10323, #10325, #10385"


@bug(
    "TRT-29",
    kind="K6",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    title="Each node of a layer is taken for a child of the node that stands where it does in the layer before",
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "trees-equal-reference"),
)
def child_of_its_place(patch: Patch) -> None:
    from engines.portable.speculative import eagle3_dynamic_tree

    of_parents = eagle3_dynamic_tree._of_parents

    def _of_parents(values: Any, parents: Any) -> Any:
        # The nodes of the first layer all follow one row.
        return values if values.shape[1] > 1 else of_parents(values, parents)

    patch(eagle3_dynamic_tree, "_of_parents", _of_parents)


@bug(
    "TRT-29",
    kind="K6",
    workers=(MTP_EAGLE_TREE,),
    variant="hidden-states",
    title="Nodes see the path of their parents, but are fed the hidden states of the nodes in their own places",
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "drafts-equal-reference"),
)
def fed_by_its_place(patch: Patch) -> None:
    from engines.portable.speculative import eagle3_dynamic_tree

    of_parents = eagle3_dynamic_tree._of_parents

    def _of_parents(values: Any, parents: Any) -> Any:
        is_mask = values.dtype.itemsize == 1
        return of_parents(values, parents) if is_mask or values.shape[1] == 1 else values

    patch(eagle3_dynamic_tree, "_of_parents", _of_parents)


@bug(
    "TRT-29",
    kind="K6",
    workers=(EAGLE3_TREE, MTP_EAGLE_TREE),
    variant="first-children",
    title="Verification looks at the first child of each node alone, as if the tree were a chain",
    reference=_REFERENCE,
    caught_by=("acceptance-follows-agreement", "acceptance-equals-reference"),
)
def first_children(patch: Patch) -> None:
    from engines.portable.speculative import eagle3_dynamic_tree
    from engines.portable.speculative.dynamic_tree_ops import verify_dynamic_tree_greedy

    def verify(candidates: Any, next_token: Any, next_sibling: Any, *arguments: Any) -> Any:
        return verify_dynamic_tree_greedy(
            candidates, next_token, next_sibling.new_full(next_sibling.shape, -1), *arguments
        )

    patch(eagle3_dynamic_tree, "verify_dynamic_tree_greedy", verify)
