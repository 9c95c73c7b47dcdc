"""TRT-37: a length contains the width of the verified rows, and the correction for it is not applied exactly once.

Before its first forward a tree drafter takes the rows of the tree off that its longest path does not have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, MTP_EAGLE, MTP_EAGLE_TREE, PARD, Patch, bug

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


def _in_flight(patch: Patch, prepare_with: Any) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    prepare = OverlapInputs.prepare

    def prepare_corrections(self: Any, generations: Any, width: int, drafts: int, previous: Any, *args: Any) -> None:
        prepare(self, generations, width, drafts, previous and prepare_with(previous, width), *args)

    patch(OverlapInputs, "prepare", prepare_corrections)


@bug(
    "TRT-37",
    kind="K3",
    workers=(EAGLE3, PARD),
    variant="this-step",
    title="The rows taken off the KV lengths are those of this step, not those that were counted of the last",
    reference=_REFERENCE,
    caught_by=("corrected-lengths-are-committed-plus-fed", "corrections-follow-last-step"),
)
def rows_of_this_step(patch: Patch) -> None:
    _in_flight(patch, lambda previous, width: replace(previous, tokens_of_rows=(width,) * len(previous.tokens_of_rows)))


@bug(
    "TRT-37",
    kind="K3",
    workers=(EAGLE3, MTP_EAGLE_TREE),
    variant="in-flight",
    title="Rows that the step in flight did not accept are never taken off the KV lengths",
    reference=_REFERENCE,
    caught_by=("corrected-lengths-are-committed-plus-fed", "corrections-follow-last-step"),
)
def never_taken_off(patch: Patch) -> None:
    from engines.portable.pyexecutor.overlap import OverlapInputs

    prepare = OverlapInputs.prepare

    def prepare_positions(self: Any, *args: Any) -> None:
        prepare(self, *args)
        self.previous_kv_lens_offsets_cuda.zero_()

    patch(OverlapInputs, "prepare", prepare_positions)


@bug(
    "TRT-37",
    kind="K3",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="planned",
    title="Rows taken off the KV lengths are the most that a request may have, not those that each has verified",
    reference=_REFERENCE,
    caught_by=("corrected-lengths-are-committed-plus-fed", "corrections-follow-last-step"),
)
def rows_of_the_widest(patch: Patch) -> None:
    def planned(previous: Any) -> Any:
        widest = 1 + previous.runtime_draft_len
        return replace(previous, tokens_of_rows=(widest,) * len(previous.tokens_of_rows))

    _in_flight(patch, lambda previous, _: planned(previous))


@bug(
    "TRT-37",
    kind="K3",
    workers=(EAGLE3, MTP_EAGLE),
    variant="drafting",
    title="The drafter's KV lengths go back by the rows of the widest request, not by those of each",
    reference=_REFERENCE,
    caught_by=("kv-lens-balanced", "kv-lens-equals-reference", "drafts-equal-reference"),
)
def back_by_the_widest(patch: Patch) -> None:
    from engines.portable.speculative.linear import LinearSpecWorker

    collapse = LinearSpecWorker._collapse_to_one_row

    def _collapse_to_one_row(self: Any, attn_metadata: Any, accepted: Any, contexts: int, verified: Any) -> None:
        widest = verified if isinstance(verified, int) or not len(verified) else verified.max()
        collapse(self, attn_metadata, accepted, contexts, widest)

    patch(LinearSpecWorker, "_collapse_to_one_row", _collapse_to_one_row)
