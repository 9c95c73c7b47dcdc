"""What the speculative metadata says beside the attention metadata: counts of tokens, and slots of requests."""

from __future__ import annotations

from typing import Final

from invariants.case import Moment, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant


@invariant(
    "spec-counts-equal-reference",
    reads=("spec_num_tokens", "num_capture_tokens"),
    museum=("TRT-102",),
    kind=REFERENCE,
    predicates=("P1",),
)
def spec_counts_equal_reference(step: StepCase, check: Check) -> None:
    """How many tokens are captured, and how many the worker's metadata class counts, follows from this batch alone.

    ``prepare`` subtracts in place from what the engine set, so a count that is not set anew shrinks from step to step.
    """
    if step.prepared is not None:
        check.said(step.prepared, ("spec_num_tokens", "num_capture_tokens"))


_SLOTS: Final = {"spec_slots": "slot_ids", "mamba_slots": "state_indices", "seq_slots": "batch_slot_ids"}
"""Slots of requests, and of the rows of a batch: of what a worker keeps, of recurrent states and of proposals."""


def _slots(step: StepCase, field: str) -> dict[int, int]:
    """Slot that each active request had when it was last observed, before this step."""
    before = step.before
    if before is None:
        return {}
    active = set(before.active) - set(before.asked.finish)
    found: dict[int, int] = {}
    while before is not None and (before.ledger is not None or not before.rows) and active - found.keys():
        ledger = before.ledger.seen if before.ledger is not None else {}
        for request, slot in ledger.get(field, {}).items():
            if request in active:
                found.setdefault(request, slot)
        before = before.before
    return found


@invariant(
    "slots-belong-to-requests",
    reads=(*_SLOTS, *_SLOTS.values()),
    museum=("TRT-56", "TRT-57"),
    predicates=("P10", "P11"),
)
def slots_belong_to_requests(step: StepCase, check: Check) -> None:
    """A request has a slot of its own, always the same, from its first chunk to its end, and afterwards none.

    ``slot_ids`` of a batch are the slots of its rows; dummies have slots that no request has. A slot that outlives its
    request is lost.
    """
    for of_requests, of_rows in _SLOTS.items():
        known = _slots(step, of_requests)
        moment = step.ledger
        if moment is not None and of_requests in moment.seen:
            slots = moment.seen[of_requests]
            expected = {request: known.get(request, slots.get(request)) for request in _active(step, moment)}
            check.equal(moment, of_requests, expected, slots, "a request keeps its slot, and only active ones have any")
            _check_distinct(moment, of_requests, list(slots.values()), check)
            known = {**slots, **known}
        for moment in step.moments:
            if of_rows in moment.seen:
                _check_rows(step, moment, of_rows, known, check)


def _check_rows(step: StepCase, moment: Moment, field: str, known: dict[int, int], check: Check) -> None:
    """Whether each row has the slot of its request, and every dummy one that nobody has, or the one of all dummies."""
    ids = moment.seen[field]
    missing = [None] * (len(step.rows) - len(ids))
    rows = [known.get(row.request) if row.request is not None else None for row in step.rows]
    expected = [slot if own is None else own for slot, own in zip([*ids, *missing], rows, strict=False)]
    check.equal(moment, field, expected, ids, "each row has the slot of its request")
    shared = step.config.num_blocks if field != "slot_ids" else None
    apart = [slot for slot, row in zip(ids, step.rows, strict=False) if row.request is not None or slot != shared]
    _check_distinct(moment, field, apart, check)


def _active(step: StepCase, moment: Moment) -> list[int]:
    """Requests that own a slot at ``moment``: none once a failure has ended them all."""
    return [] if moment is step.failed else step.held


def _check_distinct(moment: Moment, field: str, slots: list[int], check: Check) -> None:
    apart = len(set(slots)) == len(slots) and all(slot >= 0 for slot in slots)
    check.that(apart, moment, field, "distinct slots", slots, f"{field} is {slots}: one slot serves two")
