"""Proposals: what each draft was drawn from, by which rejection sampling judges it one step later.

They are written by the draft loop of one step and read by the verification of another, by the slot of the request, with
other rows, another draft length or other requests in between. Where a draft is only a placeholder, so is its proposal.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Final

from invariants.case import Row, StepCase
from invariants.check import Check
from invariants.recurrent import others_unchanged
from invariants.registry import REFERENCE, invariant
from scenarios.tracer import NO_PROPOSAL

_ROWS: Final = "draft_probs"
_KEPT: Final = "kept_draft_probs"
_TAKEN: Final = "rejection_rows"


@invariant(
    "proposals-belong-to-their-drafts",
    reads=(_ROWS,),
    museum=("TRT-10", "VLL-18"),
    predicates=("P10", "P14"),
)
def proposals_belong_to_their_drafts(step: StepCase, check: Check) -> None:
    """A generation is verified by the proposals that the last step of its own request has left, each draft by its own.

    Issue #40149 of vLLM: they never arrived, and then were another request's where rows had changed places. A draft
    that was not made, as the last step drafted fewer or none, has a placeholder for its proposal.
    """
    for run in step.runs:
        if run.verified is None or _ROWS not in run.verified.seen:
            continue
        shown = run.verified.seen[_ROWS]
        lefts = [_last(row, row.most - 1) for row in step.rows[step.num_contexts :]]
        # What was left is not known of all, but that there is something to verify each by.
        expected = [of_row if left is None else left for left, of_row in zip_longest(lefts, shown[: len(lefts)])]
        check.equal(run.verified, _ROWS, expected, shown, "so the last step of each request has left them")


def _last(row: Row, draft_len: int) -> list[int] | None:
    """The proposals that the request's row before has left for so many drafts, None if that was not observed."""
    before = row.before
    restored = before.step.returned if before is not None else None
    rows = restored.seen.get(_ROWS, []) if restored is not None else []
    left = rows[before.index] if before is not None and before.index < len(rows) else None
    return left if left is None else [*left, *[NO_PROPOSAL] * draft_len][:draft_len]


@invariant("proposals-of-others-stay", reads=(_KEPT,), museum=("TRT-10", "VLL-18"), predicates=("P10", "P11"))
def proposals_of_others_stay(step: StepCase, check: Check) -> None:
    """A step leaves alone the proposals of active requests that are not in its batch."""
    others_unchanged(step, _KEPT, check)


@invariant("rejection-sampling-takes-place", reads=(_TAKEN,), museum=("TRT-97",), predicates=("P8",))
def rejection_sampling_takes_place(step: StepCase, check: Check) -> None:
    """Where rejection sampling is configured every generation with drafts to verify goes through it.

    A guard that asked for more logits than there are turned it off for good, and nobody could tell: what is accepted
    then is only what is equal.
    """
    for run in step.runs:
        if run.restored is not None and _TAKEN in run.restored.seen:
            expected = len(step.rows) - step.num_contexts if step.draft_len else 0
            check.equal(run.restored, _TAKEN, expected, run.restored.seen[_TAKEN], "generations with drafts to verify")


@invariant(
    "proposals-equal-reference",
    reads=(_ROWS, _KEPT, _TAKEN),
    museum=("TRT-10", "TRT-97", "VLL-18"),
    kind=REFERENCE,
    predicates=("P10", "P14"),
)
def proposals_equal_reference(step: StepCase, check: Check) -> None:
    """The proposals that drafts are verified by, that new drafts leave and that are kept are the reference's."""
    for run in step.runs:
        if run.verified is not None:
            check.said(run.verified, (_ROWS,))
        if run.restored is not None:
            check.said(run.restored, (_ROWS, _TAKEN))
    if step.updated is not None:
        check.said(step.updated, (_KEPT,))
