"""Forced acceptance: the numbers that its fraction draws come from a pool on the device, through a counter there."""

from __future__ import annotations

from invariants.case import Run, StepCase
from invariants.check import Check
from invariants.registry import invariant
from scenarios.forced_acceptance import draws

_COUNTER = "force_accept_counter"


def _left(step: StepCase) -> int | None:
    """What a step leaves the counter at, None where that was not observed."""
    last = step.failed or step.returned
    return last.seen.get(_COUNTER) if last is not None else None


def _moves(step: StepCase, run: Run) -> int:
    """By how much a forward moves the counter on."""
    forced = run.phase != "graph_warmup"
    return int(forced and draws(step.config.force_num_accepted_tokens, step.draft_len))


@invariant("forced-counter-moves-once", reads=(_COUNTER,), museum=("TRT-100",), predicates=("P8", "P13"))
def forced_counter_moves_once(step: StepCase, check: Check) -> None:
    """The counter of forced acceptance moves on by one in each forward that draws from the pool, and never back.

    Also in a replay, and for good when the forward then fails; not in one that warms up a graph, and not where all
    generations get the same count. Counter and pool are there before the first forward: memory that is allocated
    while a graph is captured belongs to the graph.
    """
    left = _left(step.before) if step.before is not None else 0
    for run in step.runs:
        if run.entered is None or _COUNTER not in run.entered.seen:
            continue
        found = run.entered.seen[_COUNTER]
        if left is not None:
            check.equal(run.entered, _COUNTER, left, found, "so it was left, and it starts at 0")
        left = None
        if run.restored is not None and _COUNTER in run.restored.seen:
            left, start = run.restored.seen[_COUNTER], found or 0
            check.equal(run.restored, _COUNTER, start + _moves(step, run), left, f"the forward found it at {start}")
    if step.failed is not None and _COUNTER in step.failed.seen and step.runs:
        _check_failed(step, check)


def _check_failed(step: StepCase, check: Check) -> None:
    """How far a failed forward got is known where it was seen to return or to have accepted."""
    run, moment = step.runs[-1], step.failed
    since = run.restored or run.entered
    if moment is None or since is None or _COUNTER not in since.seen:
        return
    start, left = since.seen[_COUNTER] or 0, moment.seen[_COUNTER]
    moved = start + _moves(step, run)
    begun = [moved] if run.verified is not None else sorted({start, moved})
    possible = [start] if run.restored is not None else begun
    check.that(left in possible, moment, _COUNTER, possible, left, f"{_COUNTER} is {left}, not one of {possible}")
