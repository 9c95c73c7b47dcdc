"""What the speculative metadata says beside the attention metadata: counts of tokens, and slots of requests."""

from __future__ import annotations

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


def _slots(step: StepCase) -> dict[int, int]:
    """Slot that each active request had when it was last observed, before this step."""
    before = step.before
    if before is None:
        return {}
    active = set(before.active) - set(before.asked.finish)
    found: dict[int, int] = {}
    while before is not None and (before.ledger is not None or not before.rows) and active - found.keys():
        ledger = before.ledger.seen if before.ledger is not None else {}
        for request, slot in ledger.get("spec_slots", {}).items():
            if request in active:
                found.setdefault(request, slot)
        before = before.before
    return found


@invariant("slots-belong-to-requests", reads=("spec_slots", "slot_ids"), museum=("TRT-56",), predicates=("P10", "P11"))
def slots_belong_to_requests(step: StepCase, check: Check) -> None:
    """A request has a slot of its own from its first chunk to its end, the same one, and nothing else has any.

    ``slot_ids`` of a batch are the slots of its rows; dummies have slots that no request has. A slot that outlives its
    request is lost.
    """
    known = _slots(step)
    moment = step.ledger
    if moment is not None and "spec_slots" in moment.seen:
        slots = moment.seen["spec_slots"]
        expected = {request: known.get(request, slots.get(request)) for request in _active(step, moment)}
        check.equal(moment, "spec_slots", expected, slots, "a request keeps its slot, and only active ones have any")
        _check_distinct(moment, "spec_slots", list(slots.values()), check)
        known = {**slots, **known}
    prepared = step.prepared
    if prepared is not None and "slot_ids" in prepared.seen:
        ids = prepared.seen["slot_ids"]
        rows = [known.get(row.request) if row.request is not None else None for row in step.rows]
        expected_ids = [slot if own is None else own for slot, own in zip(ids, rows, strict=False)]
        check.equal(prepared, "slot_ids", expected_ids, ids, "each row has the slot of its request")
        _check_distinct(prepared, "slot_ids", ids, check)


def _active(step: StepCase, moment: Moment) -> list[int]:
    """Requests that own a slot at ``moment``: none once a failure has ended them all."""
    return [] if moment is step.failed else step.held


def _check_distinct(moment: Moment, field: str, slots: list[int], check: Check) -> None:
    apart = len(set(slots)) == len(slots) and all(slot >= 0 for slot in slots)
    check.that(apart, moment, field, "distinct slots", slots, f"{field} is {slots}: one slot serves two")
