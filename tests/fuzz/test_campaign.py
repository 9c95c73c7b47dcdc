"""Plans hand out units fairly, spend no more than the budget and learn from what is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz.campaign import DEATHS, FIRST_SECONDS, KILLS, Lanes, campaign
from fuzz.events import (
    BatchFinished,
    CampaignFinished,
    CampaignStarted,
    Event,
    Events,
    FindingFound,
    HarnessError,
    Tally,
    UnitFinished,
    UnitRefused,
    WorkerDied,
)
from fuzz.executors import Plan
from fuzz.unit import Unit
from scenarios import UsageError
from tests.fuzz.samples import FINDING, FOUND

UNIT = Unit(engine="portable", device="cpu", worker="MTPEagleWorker", seed=5, max_cases=10)
OTHER = replace(UNIT, worker="PARDWorker")
START = CampaignStarted(command="run", engine="portable", device="cpu", workers=("MTPEagleWorker",), seed=5)


def batch(cases: int, seconds: float = 1.0) -> BatchFinished:
    return BatchFinished(worker="MTPEagleWorker", tally=Tally(cases=cases, seconds=seconds))


def take(plan: Lanes) -> Unit:
    unit = plan.next()
    assert unit is not None
    return unit


def finish(plan: Lanes, unit: Unit, cases: int = 10, seconds: float = 1.0) -> None:
    plan.observe(unit, batch(cases, seconds))
    plan.observe(unit, UnitFinished(worker=unit.worker))


def test_a_budget_of_cases_is_one_unit_per_lane() -> None:
    plan = Lanes([UNIT, OTHER], cases=10)
    first, second = take(plan), take(plan)
    assert (first, second) == (UNIT, replace(OTHER, lane=1))
    assert plan.next() is None
    finish(plan, first)
    finish(plan, second, cases=3)
    assert plan.next() is None


def test_what_a_dead_process_left_is_done_by_another_with_another_seed() -> None:
    plan = Lanes([UNIT], cases=10)
    for deaths in range(DEATHS):
        unit = take(plan)
        assert unit.max_cases == 10 - 2 * deaths
        assert (unit.seed == 5) == (deaths == 0)
        assert plan.next() is None
        plan.observe(unit, batch(2))
        plan.observe(unit, WorkerDied(worker=unit.worker, cause="ended with status 0"))
    assert plan.next() is None


def test_the_lane_that_had_the_least_time_comes_first() -> None:
    plan = Lanes([UNIT, OTHER], seconds=1000.0)
    first = take(plan)
    finish(plan, first, seconds=5.0)
    for _ in range(2):
        unit = take(plan)
        assert unit.worker == "PARDWorker"
        finish(plan, unit, seconds=2.0)
    # 4 seconds against 5.
    assert take(plan).worker == "PARDWorker"
    assert take(plan).worker == "MTPEagleWorker"


def test_rounds_have_seeds_of_their_own() -> None:
    plan = Lanes([UNIT], seconds=1000.0)
    seeds = []
    for _ in range(3):
        unit = take(plan)
        seeds.append(unit.seed)
        finish(plan, unit)
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


def test_a_unit_never_outlasts_the_campaign() -> None:
    unit = take(Lanes([replace(UNIT, max_seconds=30.0)], seconds=2.0))
    assert unit.max_seconds is not None
    assert 1.0 < unit.max_seconds <= 2.0
    unit = take(Lanes([replace(UNIT, max_seconds=0.5)], seconds=2.0))
    assert unit.max_seconds == 0.5
    assert take(Lanes([replace(UNIT, max_seconds=0.5)], cases=4)) == replace(UNIT, max_seconds=0.5, max_cases=4)


def test_every_lane_gets_a_first_unit_even_when_the_time_is_over() -> None:
    plan = Lanes([UNIT, OTHER], seconds=0.0)
    first, second = take(plan), take(plan)
    assert (first.worker, second.worker) == ("MTPEagleWorker", "PARDWorker")
    assert first.max_seconds == second.max_seconds == FIRST_SECONDS
    finish(plan, first)
    finish(plan, second)
    assert plan.next() is None


def test_the_last_moments_are_used() -> None:
    plan = Lanes([UNIT], seconds=0.4)
    finish(plan, take(plan), seconds=0.0)
    last = take(plan).max_seconds
    assert last is not None
    assert last < FIRST_SECONDS


def test_what_is_found_is_excluded_from_then_on_for_that_worker_only() -> None:
    plan = Lanes([UNIT, UNIT, OTHER], seconds=1000.0)
    unit = take(plan)
    plan.observe(unit, FOUND)
    plan.observe(unit, HarnessError(worker=unit.worker, key="x did not fire", message="m"))
    known = {"restored-layout", *FOUND.also, "x did not fire"}
    assert set(take(plan).exclude) == known
    assert take(plan).exclude == ()
    finish(plan, unit)
    assert set(take(plan).exclude) == known


def test_a_lane_that_wants_the_first_finding_ends_with_it() -> None:
    plan = Lanes([replace(UNIT, first=True)], cases=100)
    unit = take(plan)
    plan.observe(unit, batch(3))
    plan.observe(unit, FOUND)
    plan.observe(unit, WorkerDied(worker=unit.worker, cause="ended with status 0"))
    assert plan.next() is None


def test_a_lane_that_does_nothing_ends() -> None:
    plan = Lanes([UNIT], seconds=1000.0)
    plan.observe(take(plan), UnitFinished(worker=UNIT.worker))
    assert plan.next() is None


class Scripted:
    """An executor whose events are known."""

    def __init__(self, *script: Event) -> None:
        self.script = script

    def execute(self, plan: Plan) -> Events:
        yield from self.script


def test_the_same_violation_is_passed_on_once() -> None:
    elsewhere = replace(FINDING, scenario=replace(FINDING.scenario, note="another way to it"))
    seeded = replace(FINDING, bug="TRT-03/MTPEagleWorker")
    script = [FindingFound(finding=finding, cases=1) for finding in (FINDING, elsewhere, seeded)]
    first, *middle, last = campaign(START, Lanes([]), Scripted(*script))
    assert first == START
    assert middle == [script[0], script[2]]
    assert isinstance(last, CampaignFinished)


def test_a_refused_unit_ends_the_campaign() -> None:
    with pytest.raises(UsageError, match="no cuda here"):
        list(campaign(START, Lanes([]), Scripted(UnitRefused(message="--device: no cuda here"))))


def test_a_lane_that_was_given_up_is_a_problem() -> None:
    plan = Lanes([UNIT], cases=10)
    for _ in range(DEATHS):
        plan.observe(take(plan), WorkerDied(worker=UNIT.worker, cause="ended with status 0"))
    _, error, _ = campaign(START, plan, Scripted())
    assert isinstance(error, HarnessError)
    assert error.message == "given up after 3 deaths of its process"


def test_kills_from_outside_are_borne_for_longer_and_complained_of_once() -> None:
    plan = Lanes([UNIT, UNIT], cases=10)
    for _ in range(2 * KILLS):
        unit = plan.next()
        assert unit is not None
        plan.observe(unit, WorkerDied(worker=UNIT.worker, cause="was killed by SIGKILL", killed=True))
    assert plan.next() is None
    _, error, _ = campaign(START, plan, Scripted())
    assert isinstance(error, HarnessError)
    assert error.message == "given up, as its process was killed from outside 10 times: is memory short?"
