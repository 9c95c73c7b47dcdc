"""Trees of drafts, and chains: masks that say which of them see each other, in the target's forward and draft calls.

Mask, offsets and lengths are buffers of the metadata that a draft loop overwrites layer by layer. They are neither
lengths nor counts, so saving those does not save them. They speak of the generations of the target, of the same rows
in the first draft call, and of every row in the later ones: always the last rows of the batch.
"""

from __future__ import annotations

from typing import Final

from invariants.case import Moment, Row, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant
from scenarios.trace import ENTERED, FAILED, PREPARED, RESTORED

MASK: Final = "spec_decoding_packed_mask"
OFFSETS: Final = "spec_decoding_position_offsets"
LENGTHS: Final = "spec_decoding_generation_lengths"
MASKS: Final = (MASK, OFFSETS, LENGTHS)

Mask = list[list[int]]
"""Of one row: per node the nodes that it sees."""


@invariant(
    "tree-widths-share-one-stride",
    reads=(*MASKS, "_seq_lens", "num_contexts"),
    museum=("TRT-29", "TRT-75", "TRT-01"),
    trait="tree",
    predicates=("P5",),
)
def tree_widths_share_one_stride(step: StepCase, check: Check) -> None:
    """At every sub-step mask, offsets and lengths have as many nodes per row as the row has queries.

    A kernel strides through all three by one width. The queries are T + 1 nodes for the target, K + 1 tokens in the
    first draft call and ``i * dynamic_tree_max_topK`` nodes in call i.
    """
    for moment in step.moments if step.traits.tree else ():
        seen = moment.seen
        if "_seq_lens" not in seen or "num_contexts" not in seen:
            continue
        widths = seen["_seq_lens"][seen["num_contexts"] :]
        why = f"queries of the rows are {widths}"
        if LENGTHS in seen:
            check.equal(moment, LENGTHS, widths, seen[LENGTHS], why)
        for field in (MASK, OFFSETS):
            if field in seen:
                check.equal(moment, field, widths, [len(nodes) for nodes in seen[field]], why)


@invariant("chain-masks-are-causal", reads=MASKS, museum=("TRT-06", "TRT-29"), predicates=("P7",))
def chain_masks_are_causal(step: StepCase, check: Check) -> None:
    """In a chain of drafts, or a path that was accepted from a tree, each token sees itself and those before it.

    The tables of chains are made once per width and belong to all batches of the process: who writes into them
    writes into those of others, so they are looked at after the worker, too.
    """
    chains = step.rows[step.num_contexts :]
    if not chains or not step.draft_len:
        return
    tree = step.traits.tree
    widths = [step.draft_len + 1 if tree else row.query for row in chains]
    places = [list(range(width)) for width in widths]
    causal = [[row[: node + 1] for node in row] for row in places]
    for moment in step.moments:
        if moment.name in (["draft[0]"] if tree else [PREPARED, ENTERED, RESTORED]):
            for field, expected in zip(MASKS, (causal, places, widths), strict=True):
                if field in moment.seen:
                    check.equal(moment, field, expected, moment.seen[field], f"the chains have {widths} tokens")


@invariant("tree-masks-put-back", reads=MASKS, museum=("TRT-01", "TRT-03", "TRT-04"), predicates=("P2", "P5"))
def tree_masks_put_back(step: StepCase, check: Check) -> None:
    """Each forward on one preparation finds the masks that ``prepare`` wrote, and leaves them so, even if it fails.

    A captured graph reads them in place: the mask of a draft layer that is left there becomes the target's.
    """
    before = step.prepared
    if before is None:
        return
    for moment in step.moments:
        if moment.name in (ENTERED, RESTORED, FAILED):
            check.kept(moment, before, MASKS)


@invariant(
    "tree-mask-is-ancestry", reads=(MASK, OFFSETS), museum=("TRT-29", "TRT-01"), trait="tree", predicates=("P5",)
)
def tree_mask_is_ancestry(step: StepCase, check: Check) -> None:
    """In every forward a node sees itself and what the node above it sees, and its offset counts the nodes above.

    So no node sees a sibling, a cousin or a node that comes later; positions follow from the offsets.
    """
    for moment in step.forwards if step.traits.tree else ():
        if MASK not in moment.seen:
            continue
        masks: list[Mask] = moment.seen[MASK]
        expected = [[_with_ancestors(mask, node) for node in range(len(mask))] for mask in masks]
        check.equal(moment, MASK, expected, masks, "a node sees itself and those above it")
        if OFFSETS in moment.seen:
            depths = [[len(nodes) - 1 for nodes in mask] for mask in masks]
            check.equal(moment, OFFSETS, depths, moment.seen[OFFSETS], "so many nodes are above it in the mask")


def _parent(mask: Mask, node: int) -> int | None:
    """The lowest node above ``node``, None at the top."""
    above = [other for other in mask[node] if other < node]
    return above[-1] if above else None


def _with_ancestors(mask: Mask, node: int) -> list[int]:
    parent = _parent(mask, node)
    return [node] if parent is None else [*mask[parent], node]


@invariant(
    "verified-tree-is-the-drafted-one",
    reads=(MASK, "draft_tree"),
    museum=("TRT-24", "TRT-29", "TRT-75"),
    trait="tree",
    predicates=("P5", "P10"),
)
def verified_tree_is_the_drafted_one(step: StepCase, check: Check) -> None:
    """The mask of a generation is that of the tree that its own last step drafted; without one all follow the root.

    Its first generation has none, as the drafts of a context are thrown away.
    """
    moment = step.prepared
    if moment is None or MASK not in moment.seen or not step.traits.tree:
        return
    for row, mask in zip(step.rows[step.num_contexts :], moment.seen[MASK], strict=False):
        tree = _drafted(row, step.width)
        if tree is not None:
            parents = [_parent(mask, node) for node in range(1, len(mask))]
            expected = [parent + 1 for parent in tree]
            check.equal(moment, MASK, expected, parents, f"node above each node of request {row.request}")


def _drafted(row: Row, width: int) -> list[int] | None:
    """Parents of the nodes that a generation verifies, -1 for the root; None if they were not observed."""
    if row.request is None:
        return [-1] * width
    updated = row.before.step.updated if row.before is not None else None
    tree: list[int] | None = updated.seen.get("draft_tree", {}).get(row.request) if updated is not None else None
    return [-1] * width if tree == [] else tree


@invariant("draft-tree-well-formed", reads=("draft_tree",), museum=("TRT-29",), predicates=("P5",))
def draft_tree_well_formed(step: StepCase, check: Check) -> None:
    """A tree has all its T nodes, each after the one that it follows, and its longest path has K nodes.

    The path of the best candidates is always kept, and it is that long. Contexts leave no tree.
    """
    moment = step.updated
    if moment is None or "draft_tree" not in moment.seen:
        return
    contexts = {row.request for row in step.rows if row.is_context}
    generations = {row.request for row in step.rows if not row.is_context}
    for request, tree in moment.seen["draft_tree"].items():
        if request in contexts:
            check.equal(moment, "draft_tree", [], tree, f"request {request} is in its prompt")
        elif request in generations:
            depths = _depths(tree)
            nodes, deepest = step.width, step.draft_len
            holds = depths is not None and len(tree) == nodes and max(depths, default=0) == deepest
            check.that(
                holds, moment, "draft_tree", f"{nodes} nodes, {deepest} deep", tree,
                f"the tree of request {request} is {tree}; it has {nodes} nodes, each after its parent, {deepest} deep",
            )  # fmt: skip


def _depths(tree: list[int]) -> list[int] | None:
    """Depth of each node, 1 below the root; None where a node comes before its parent."""
    depths: list[int] = []
    for node, parent in enumerate(tree):
        if not -1 <= parent < node:
            return None
        depths.append(1 if parent == -1 else depths[parent] + 1)
    return depths


@invariant("layers-grow-the-tree", reads=(MASK,), museum=("TRT-01", "TRT-24"), trait="tree", predicates=("P5",))
def layers_grow_the_tree(step: StepCase, check: Check) -> None:
    """Each draft call but the first adds a layer below the last one and keeps the nodes before it.

    The nodes of call 1 follow what is cached, so each sees itself alone.
    """
    for run in step.runs:
        for i, moment in run.drafts.items():
            if i and MASK in moment.seen:
                _layer(step.config.dynamic_tree_max_topK, i, moment, run.drafts.get(i - 1), check)


def _layer(topk: int, i: int, moment: Moment, before: Moment | None, check: Check) -> None:
    masks: list[Mask] = moment.seen[MASK]
    if i > 1 and before is not None and MASK in before.seen:
        kept = [mask[: (i - 1) * topk] for mask in masks]
        check.equal(moment, MASK, before.seen[MASK], kept, f"nodes of call {i - 1}")
    last = {None} if i == 1 else set(range((i - 2) * topk, (i - 1) * topk))
    parents = [[_parent(mask, node) for node in range((i - 1) * topk, len(mask))] for mask in masks]
    holds = all(set(new) <= last for new in parents)
    message = f"the new nodes follow {parents}, not nodes of the layer before"
    check.that(holds, moment, MASK, sorted(last, key=str), parents, message)


@invariant(
    "trees-equal-reference",
    reads=(*MASKS, "draft_tree"),
    museum=("TRT-29", "TRT-24"),
    kind=REFERENCE,
    predicates=("P5",),
)
def trees_equal_reference(step: StepCase, check: Check) -> None:
    """Masks, offsets, lengths and the trees that are drafted are the reference's."""
    for moment in step.moments:
        if moment is not step.failed:
            check.said(moment, (*MASKS, "draft_tree"))
