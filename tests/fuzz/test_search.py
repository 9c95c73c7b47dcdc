"""The search finds, shrinks, goes on, and says when it cannot be trusted."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from engines.base import run
from fuzz import search
from fuzz.events import BatchFinished, Event, FindingFound, HarnessError, Tally, UnitFinished, UnitRefused
from fuzz.journal import Journal, read_case
from fuzz.unit import Unit
from fuzz.work import run_unit
from invariants import Relation, all_invariants, verify
from scenarios import Scenario, Trace, check
from tests.fuzz import fakes
from tests.fuzz.samples import size


def unit(engine: str, **options: object) -> Unit:
    base = Unit(engine=f"tests.fuzz.fakes:{engine}", device="cpu", worker="MTPEagleWorker", seed=1, max_cases=40)
    return replace(base, **options)  # type: ignore[arg-type]


def findings(events: list[Event]) -> list[FindingFound]:
    return [event for event in events if isinstance(event, FindingFound)]


def errors(events: list[Event]) -> list[HarnessError]:
    return [event for event in events if isinstance(event, HarnessError)]


def total(events: list[Event]) -> Tally:
    return sum((event.tally for event in events if isinstance(event, BatchFinished)), Tally())


def timeless(events: list[Event]) -> list[Event]:
    return [
        replace(event, tally=replace(event.tally, seconds=0.0)) if isinstance(event, BatchFinished) else event
        for event in events
    ]


def test_a_sound_engine_yields_counts_and_nothing_else() -> None:
    events = list(run_unit(unit("Sound", max_cases=100)))
    assert [type(event) for event in events] == [BatchFinished, BatchFinished, UnitFinished]
    tally = total(events)
    assert tally.cases == 100
    assert tally.steps > 100
    assert tally.planned == tally.fired > 10
    assert tally.reached == tally.held
    assert tally.reached["output-lossless"] > 0
    # Of the relations, one per case, but all of them in turn.
    for relation in ("next-step-equals-never-failed-twin", "batch-equals-requests-alone", "row-order-does-not-matter"):
        assert tally.reached[relation] > 0
    assert "num_contexts" in tally.observed
    assert "identity" not in tally.observed


def test_it_opens_with_short_scenarios_that_fail() -> None:
    opening, *_ = (e.tally for e in run_unit(unit("Sound", max_cases=search.OPENING)) if isinstance(e, BatchFinished))
    assert opening.planned >= opening.cases == search.OPENING
    assert opening.steps <= 2 * search.OPENING
    # Where no step may fail there is nothing to open with.
    first, *_ = (e.tally for e in run_unit(unit("Sound", max_cases=20, faults=())) if isinstance(e, BatchFinished))
    assert (first.cases, first.planned) == (20, 0)


@pytest.mark.exhaustive
def test_the_same_unit_does_the_same_and_another_seed_does_not() -> None:
    once, again = (timeless(list(run_unit(unit("Sound", max_cases=12)))) for _ in range(2))
    assert once == again
    assert timeless(list(run_unit(unit("Sound", max_cases=12, seed=2)))) != once


@pytest.mark.exhaustive
def test_hypothesis_profiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypothesis import settings

    once = timeless(list(run_unit(unit("Sound", max_cases=12))))
    monkeypatch.setenv("CI", "1")
    before = settings.get_current_profile_name()
    settings.load_profile("ci")
    try:
        assert timeless(list(run_unit(unit("Sound", max_cases=12)))) == once
    finally:
        settings.load_profile(before)


def test_a_violation_is_shrunk_and_confirmed() -> None:
    (found,) = findings(list(run_unit(unit("Forgetful", first=True))))
    finding = found.finding
    assert finding.engine == "tests.fuzz.fakes:Forgetful"
    assert finding.violation.field == "num_contexts"
    scenario = check(finding.scenario)
    # A mixed batch needs a request that generates and one that begins.
    assert len(scenario.requests) == 2
    assert len(scenario.steps) == 2
    assert all(step.fault is None for step in scenario.steps)
    assert scenario.config.max_draft_len == 1

    def run(scenario: Scenario) -> Trace:
        engine = fakes.Forgetful()
        session = engine.open(scenario.config, scenario.requests)
        for step in scenario.steps:
            session.step(step)
        return session.trace()

    violations = verify(scenario, run, only=[finding.invariant]).violations
    assert violations[0] == finding.violation


@pytest.mark.exhaustive
def test_consequences_are_folded_into_the_finding_and_the_search_goes_on() -> None:
    events = list(run_unit(unit("Forgetful")))
    found = findings(events)
    assert len(found) == 1
    assert "derived-counters-consistent" in {found[0].finding.invariant, *found[0].also}
    assert total(events).cases == 40
    assert found[0].cases < 40


@pytest.mark.exhaustive
def test_independent_violations_are_shrunk_apart() -> None:
    found = findings(list(run_unit(unit("Twofold", max_cases=60))))
    assert {event.finding.violation.field for event in found} == {"gather_ids", "free_blocks"}
    by_field = {event.finding.violation.field: event.finding.scenario for event in found}
    assert all(len(scenario.steps) == 1 for scenario in by_field.values())
    assert by_field["gather_ids"].config.max_draft_len == 1
    assert by_field["free_blocks"].steps[0].draft_len == 3


@pytest.mark.exhaustive
def test_what_is_known_is_not_searched_for_but_named_where_the_same_scenario_violates_it() -> None:
    events = list(run_unit(unit("Forgetful", exclude=("restored-layout",), first=True)))
    (found,) = findings(events)
    assert found.finding.invariant != "restored-layout"
    assert "restored-layout" in found.also
    assert "restored-layout" not in total(events).reached


@pytest.mark.exhaustive
def test_an_excluded_relation_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    relations = tuple(i.slug for i in all_invariants() if isinstance(i, Relation))
    opened = []
    monkeypatch.setattr(fakes.Sound, "tamper", lambda self, step, done: opened.append(done.index == 0) or done)
    tally = total(list(run_unit(unit("Sound", faults=(), max_cases=10, exclude=relations))))
    assert sum(opened) == 10
    assert not set(relations) & set(tally.reached)


@pytest.mark.exhaustive
def test_only_named_invariants_are_asked_and_always_whether_faults_surface() -> None:
    events = list(run_unit(unit("Forgetful", invariants=("output-lossless",))))
    assert findings(events) == []
    assert set(total(events).reached) == {"output-lossless", "fault-surfaces"}


@pytest.mark.exhaustive
def test_without_faults_none_is_planned() -> None:
    events = list(run_unit(unit("Silent", faults=())))
    assert total(events).planned == 0
    assert errors(events) == []


@pytest.mark.exhaustive
def test_draft_lengths_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    monkeypatch.setattr(fakes.Sound, "tamper", lambda self, step, done: seen.add(step.draft_len) or done)
    list(run_unit(unit("Sound", max_draft_len=2)))
    assert seen == {0, 1, 2}


def test_a_planned_fault_that_does_not_fire_is_an_error_of_the_suite() -> None:
    events = list(run_unit(unit("Silent")))
    assert findings(events) == []
    # Each site once, however often it was planned.
    assert len(errors(events)) == len(fakes.SITES)
    assert all("did not fire" in error.message for error in errors(events))
    assert errors(events)[0].scenario is not None
    tally = total(events)
    assert tally.fired < tally.planned


def test_a_planned_fault_that_is_swallowed_is_a_finding() -> None:
    events = list(run_unit(unit("Swallowing", invariants=("output-lossless",))))
    assert [event.finding.invariant for event in findings(events)] == ["fault-surfaces"]


@pytest.mark.exhaustive(every=2, first=1)
@pytest.mark.parametrize(("engine", "text"), [("Crashing", "no such row"), ("Unrecordable", "no such site")])
def test_an_exception_of_the_suite_is_an_error_with_its_place(engine: str, text: str) -> None:
    events = list(run_unit(unit(engine)))
    assert findings(events) == []
    (error,) = errors(events)
    assert f"fakes.py:{0}"[:-1] in error.message
    assert text in error.message
    assert error.scenario is not None
    assert total(events).cases == 40 or engine == "Unrecordable"


@pytest.mark.exhaustive
def test_a_violation_that_does_not_repeat_is_an_error_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes.Fickle, "batches", itertools.count())
    events = list(run_unit(unit("Fickle", faults=())))
    assert findings(events) == []
    assert any("failed and then held" in error.message for error in errors(events))
    # Not even when it has failed all the time that it was shrunk.
    monkeypatch.setattr(fakes.Fickle, "batches", itertools.count())
    monkeypatch.setattr(search.Search, "_again", lambda self, failure, scenario: failure)
    monkeypatch.setattr("fuzz.search.shrink", lambda scenario, fails, **limits: scenario)
    (first, *_) = errors(list(run_unit(unit("Fickle", faults=()))))
    assert "failed and then held" in first.message


def test_an_engine_that_cannot_run_here_refuses_the_unit() -> None:
    refused, finished = run_unit(unit("Refusing"))
    assert isinstance(refused, UnitRefused)
    assert refused.message == "--engine: this engine needs another machine; use that one"
    assert isinstance(finished, UnitFinished)


def test_cases_that_an_engine_cannot_drive_are_passed_over() -> None:
    events = list(run_unit(unit("Choosy", max_cases=10)))
    assert errors(events) == []
    assert total(events).cases == 10
    assert total(events).planned > 0


def test_an_engine_that_can_drive_nothing_says_why_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(search, "run", lambda *args, **options: (asked.append(args), run(*args, **options)))
    events = list(run_unit(unit("Unwilling")))
    assert len(asked) == search.MOST_REFUSALS
    (error,) = errors(events)
    assert error.message == "config.worker: this engine has none; name another one"
    assert total(events).cases == 0


def test_strategies_that_do_not_work_are_an_error_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "scenarios", lambda **options: st.integers(2, 1))
    (error,) = errors(list(run_unit(unit("Sound", faults=()))))
    assert "InvalidArgument" in error.message


def test_anything_else_that_goes_wrong_becomes_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "all_invariants", lambda: 1 / 0)
    error, finished = run_unit(unit("Sound"))
    assert isinstance(error, HarnessError)
    assert "ZeroDivisionError" in error.message
    assert isinstance(finished, UnitFinished)


def test_time_ends_the_search() -> None:
    began = time.monotonic()
    events = list(run_unit(unit("Slow", max_cases=100_000, max_seconds=0.5)))
    # Without an end it would take an hour; a busy machine may need a while for the case that is running.
    assert time.monotonic() - began < 60
    assert total(events).cases < 100


def test_time_ends_the_shrinking_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHRINK_SECONDS", 0.0)
    (found,) = findings(list(run_unit(unit("Forgetful", max_seconds=20.0, first=True))))
    assert found.finding.violation.field == "num_contexts"


@pytest.mark.exhaustive
def test_the_number_of_runs_ends_the_shrinking_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHRINK_RUNS", 0)
    (large,) = findings(list(run_unit(unit("Forgetful", first=True))))
    monkeypatch.undo()
    (small,) = findings(list(run_unit(unit("Forgetful", first=True))))
    assert size(small.finding.scenario) < size(large.finding.scenario)


def test_each_case_is_on_disk_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "running" / "1.json")
    seen = []
    original = fakes.Sound.tamper

    def tamper(self: fakes.Sound, step: object, done: object) -> object:
        seen.append(read_case(journal.path))
        return original(self, step, done)  # type: ignore[arg-type]

    monkeypatch.setattr(fakes.Sound, "tamper", tamper)
    list(run_unit(unit("Sound", max_cases=5), journal))
    assert seen
    assert all(case is not None and case.engine == "tests.fuzz.fakes:Sound" for case in seen)
    assert read_case(journal.path) is None
    journal.close()
    assert not journal.path.exists()


def test_a_failing_case_stays_noted_from_its_judgement_to_its_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[bytes] = []
    monkeypatch.setattr(Journal, "_note", lambda self, text: notes.append(text))
    journal = Journal(tmp_path / "1.json")
    assert findings(list(run_unit(unit("Forgetful", first=True), journal)))
    judged, shrunk, forgotten = notes[-3:]
    assert judged == shrunk != b""
    assert forgotten == b""
    journal.close()


@pytest.mark.exhaustive
def test_without_aim() -> None:
    """The same search over scenarios that nobody has thought about."""
    events = list(run_unit(unit("Forgetful", plain=True)))
    found = [event.finding.invariant for event in events if isinstance(event, FindingFound)]
    assert "restored-layout" in found
    assert not [event for event in events if isinstance(event, HarnessError)]
