"""Forced acceptance: the numbers that its fraction draws come from a pool on the device, through a counter there."""

from __future__ import annotations

from invariants.case import Moment, Run, StepCase
from invariants.check import Check
from invariants.registry import invariant
from scenarios.forced_acceptance import draws

_COUNTER = "force_accept_counter"


def _last(step: StepCase | None) -> Moment | None:
    """The last moment of a step at which the counter was observed."""
    moments = [moment for moment in step.moments if _COUNTER in moment.seen] if step is not None else []
    return moments[-1] if moments else None


def _moves(step: StepCase, run: Run) -> int:
    """By how much a forward moves the counter on."""
    forced = run.phase != "graph_warmup"
    return int(forced and draws(step.config.force_num_accepted_tokens, step.draft_len))


@invariant("forced-counter-moves-once", reads=(_COUNTER,))
def forced_counter_moves_once(step: StepCase, check: Check) -> None:
    """The counter of forced acceptance moves on by one in each forward that draws from the pool, and never back.

    Also in a replay, and for good when the forward then fails; not in one that warms up a graph, and not where all
    generations get the same count. Counter and pool are there before the first forward: memory that is allocated
    while a graph is captured belongs to the graph.
    """
    before = _last(step.before)
    for run in step.runs:
        if run.entered is None or _COUNTER not in run.entered.seen:
            continue
        found = run.entered.seen[_COUNTER]
        start = before.seen[_COUNTER] if before is not None else 0
        check.equal(run.entered, _COUNTER, start, found, "so the forward before left it" if before else "it is new")
        if run.restored is not None and _COUNTER in run.restored.seen:
            left, moved = run.restored.seen[_COUNTER], start + _moves(step, run)
            check.equal(run.restored, _COUNTER, moved, left, f"it was {start} when the forward began")
            before = run.restored
    if step.failed is not None and _COUNTER in step.failed.seen and step.runs:
        _check_failed(step, check)


def _check_failed(step: StepCase, check: Check) -> None:
    """How far a failed forward got is known where it was seen to return or to have accepted."""
    run, moment = step.runs[-1], step.failed
    since = run.restored or run.entered
    if moment is None or since is None or _COUNTER not in since.seen:
        return
    start, left = since.seen[_COUNTER], moment.seen[_COUNTER]
    moved = start + _moves(step, run)
    begun = [moved] if run.verified is not None else sorted({start, moved})
    possible = [start] if run.restored is not None else begun
    check.that(left in possible, moment, _COUNTER, possible, left, f"{_COUNTER} is {left}, not one of {possible}")
