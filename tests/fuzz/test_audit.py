"""Whether a planned fault struck as planned, and where an exception came from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz.audit import audit, crash, planned_faults, raised_at
from scenarios import StepTrace, Substep, Trace
from tests.fuzz.fakes import Sound
from tests.fuzz.samples import MIXED


def trace(**first_step: object) -> Trace:
    """A run of the sample, whose first step fails as planned, with other facts about that step."""
    session = Sound().open(MIXED.config, MIXED.requests)
    for step in MIXED.steps:
        session.step(step)
    done = session.trace()
    return replace(done, steps=(replace(done.steps[0], **first_step), *done.steps[1:]))  # type: ignore[arg-type]


def test_a_fault_that_struck_once_is_sound() -> None:
    assert audit(MIXED, trace()) is None
    # What the engine made of it is for an invariant to judge.
    assert audit(MIXED, trace(injected=False)) is None


@pytest.mark.parametrize(("fired", "how"), [(0, "did not fire"), (2, "fired 2 times")])
def test_a_fault_that_did_not_strike_once_is_not(fired: int, how: str) -> None:
    failure = audit(MIXED, trace(fired=fired))
    assert failure is not None
    assert failure.key == f"draft_model.forward {how}"
    assert failure.message == f"steps[0]: the planned fault draft_model.forward@2:oom {how}"
    assert failure.harness


def test_a_step_that_was_not_reached_planned_nothing() -> None:
    assert len(list(planned_faults(MIXED, trace()))) == 1
    assert list(planned_faults(MIXED, replace(trace(), steps=()))) == []


def failed(place: str | None, *, injected: bool) -> StepTrace:
    moment = Substep("failed", 0, "eager", {} if place is None else {"raised_at": place})
    return replace(trace().steps[1], outcome="tolerated", injected=injected, substeps=(moment,))


def test_an_exception_that_nobody_planned_is_the_one_to_look_at_and_no_other_is_named() -> None:
    planned, unplanned = failed("a.py:1", injected=True), failed("b.py:2", injected=False)
    assert raised_at(replace(trace(), steps=(planned, unplanned))) == "b.py:2"
    assert raised_at(replace(trace(), steps=(planned,))) is None
    assert raised_at(replace(trace(), steps=(failed(None, injected=False),))) is None
    assert raised_at(replace(trace(), steps=(replace(planned, substeps=()), unplanned))) == "b.py:2"
    assert raised_at(replace(trace(), steps=())) is None


def test_a_crash_is_told_by_its_place() -> None:
    try:
        {}["row"]
    except KeyError as error:
        failure = crash(error)
    assert failure.key.startswith("KeyError at ")
    assert failure.message == f"{failure.key}: 'row'"
    assert failure.harness
