"""The state machine: both sides take the same steps, and a difference is found and kept small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Part
from hypothesis.stateful import run_state_machine_as_test

from scenarios import Config, Request, Scenario, Schedule, Step, StepTrace, check
from strategies import ScenarioMachine, make_machine

quick = settings(
    max_examples=40, stateful_step_count=14, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class Walker:
    """A session that knows lengths only. ``spoil`` falsifies the outcome of steps."""

    opened: ClassVar[list[Walker]] = []

    def __init__(self, config: Config, spoil: Callable[[Step], bool] = lambda _: False) -> None:
        self.schedule = Schedule(config)
        self.spoil = spoil
        self.steps: list[Step] = []
        self.closed = False
        Walker.opened.append(self)

    def add(self, request: Request) -> None:
        self.schedule.add(request)

    def step(self, step: Step) -> StepTrace:
        self.schedule.advance(step)
        self.steps.append(step)
        outcome = "spoilt" if self.spoil(step) else "tolerated" if step.fault else "ok"
        return StepTrace(index=len(self.steps) - 1, phase=step.phase, outcome=outcome, substeps=())

    def close(self) -> None:
        self.closed = True


def agree(scenario: Scenario, actual: StepTrace, expected: StepTrace) -> None:
    assert actual.outcome == expected.outcome, scenario


@pytest.fixture(autouse=True)
def _none_open() -> None:
    Walker.opened.clear()


def test_it_takes_every_kind_of_step_and_closes_what_it_opens() -> None:
    seen = Counter[str]()

    def compare(scenario: Scenario, actual: StepTrace, expected: StepTrace) -> None:
        agree(check(scenario), actual, expected)
        assert actual.index == len(scenario.steps) - 1
        step = scenario.steps[-1]
        seen[step.phase.value] += 1
        seen["fault"] += step.fault is not None

    def record(scenario: Scenario) -> Mapping[str, int]:
        return {"target_model.forward": 2}

    machine = make_machine(open_session=Walker, open_reference=Walker, check_step=compare, record=record)
    run_state_machine_as_test(machine, settings=quick)
    assert set(seen) == {"warmup", "capture", "eager", "replay", "fault"}
    assert seen["fault"] > 10
    sides = zip(Walker.opened[::2], Walker.opened[1::2], strict=True)
    for reference, session in sides:
        assert session.steps == reference.steps
        assert (reference.closed, session.closed) == (False, True)


def test_without_record_no_step_fails() -> None:
    machine = make_machine(open_session=Walker, open_reference=Walker, check_step=agree, max_startup=0)
    run_state_machine_as_test(machine, settings=settings(quick, max_examples=15))
    steps = [step for walker in Walker.opened for step in walker.steps]
    assert len(steps) > 100
    assert not any(step.fault or step.phase.is_startup for step in steps)


def test_a_difference_is_found() -> None:
    machine: type[ScenarioMachine] = make_machine(
        open_session=lambda config: Walker(
            config, spoil=lambda step: len(step.generations) > 0 and step.draft_len == 0
        ),
        open_reference=Walker,
        check_step=agree,
        workers=["MTPEagleWorker"],
    )
    with pytest.raises(AssertionError) as raised:
        run_state_machine_as_test(machine, settings=settings(quick, phases=[Part.generate], max_examples=200))
    assert "spoilt" in str(raised.value)


def test_an_engine_that_does_not_open_is_reported_as_it_is() -> None:
    def refuse(config: Config) -> Walker:
        raise ValueError("no device")

    machine = make_machine(open_session=refuse, open_reference=Walker, check_step=agree)
    with pytest.raises(ValueError, match="no device"):
        run_state_machine_as_test(machine, settings=settings(quick, phases=[Part.generate], max_examples=5))
