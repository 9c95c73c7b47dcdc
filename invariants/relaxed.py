"""Relaxed acceptance: how far below the target's first choice a draft may be, kept per request on the device."""

from __future__ import annotations

from invariants.case import StepCase
from invariants.check import Check
from invariants.registry import invariant

_DELTA, _LEFT = "relaxed_delta", "relaxed_delta_left"


@invariant(
    "relaxed-delta-belongs-to-thinking",
    reads=(_DELTA, _LEFT, "emitted"),
    museum=("TRT-131",),
    predicates=("P10", "P11"),
)
def relaxed_delta_belongs_to_thinking(step: StepCase, check: Check) -> None:
    """A request that thinks has the configured delta from its last chunk on, any other none; no free slot has one.

    The chunk that ends the prompt decides, as it holds the token that begins the phase; also where the step drafts
    nothing.
    """
    moment = step.ledger
    if moment is None:
        return
    if _LEFT in moment.seen:
        check.equal(moment, _LEFT, [], moment.seen[_LEFT], "what belongs to no request is zeroed with its slot")
    if _DELTA in moment.seen and "emitted" in moment.seen:
        delta, requests = round(step.config.relaxed_delta, 6), step.case.requests
        emitted = moment.seen["emitted"].items()
        expected = {number: delta if requests[number].thinking and tokens else 0 for number, tokens in emitted}
        check.equal(moment, _DELTA, expected, moment.seen[_DELTA], "so its prompt says")
