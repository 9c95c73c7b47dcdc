"""Units run in this process or in spawned ones; a process that dies or hangs becomes a finding."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz import executors
from fuzz.alone import how_it_ended
from fuzz.audit import PROCESS_SURVIVES
from fuzz.events import BatchFinished, Event, FindingFound, HarnessError, UnitFinished, WorkerDied, encode
from fuzz.executors import Executor, InProcess, Spawned
from fuzz.journal import read_case
from fuzz.store import Store
from fuzz.subject import read_subject
from fuzz.unit import Unit
from scenarios import check
from tests.fuzz.conftest import Eventually


class Queue:
    """A plan that hands out units in order and keeps what it hears."""

    def __init__(self, *units: Unit) -> None:
        self.units = deque(units)
        self.heard: list[tuple[Unit, Event]] = []

    def next(self) -> Unit | None:
        return self.units.popleft() if self.units else None

    def observe(self, unit: Unit, event: Event) -> None:
        self.heard.append((unit, event))


def unit(engine: str = "Sound", **options: object) -> Unit:
    base = Unit(
        engine=f"tests.fuzz.fakes:{engine}",
        device="cpu",
        worker="MTPEagleWorker",
        seed=1,
        max_cases=20,
        faults=(),
    )
    return replace(base, **options)  # type: ignore[arg-type]


def timeless(events: list[Event]) -> list[Event]:
    return [
        replace(e, tally=replace(e.tally, seconds=0.0, memory=0, grown=0)) if isinstance(e, BatchFinished) else e
        for e in events
    ]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "running"
    assert list((tmp_path / "running").iterdir()) == [], "a journal was left behind"
    assert multiprocessing.active_children() == []


@pytest.mark.exhaustive
def test_spawned_processes_do_what_this_one_does(running: Path) -> None:
    seams = unit(worker="PARDWorker", faults=("seams",), seed=2, max_cases=8)
    units = [unit(max_cases=8), seams, unit("Forgetful", first=True)]
    here, there = Queue(*units), Queue(*units)
    both: list[tuple[Executor, Queue]] = [(InProcess(running), here), (Spawned(1, running), there)]
    one, other = (list(executor.execute(plan)) for executor, plan in both)
    measured = [[e.tally.memory for e in events if isinstance(e, BatchFinished)] for events in (one, other)]
    assert set(measured[0]) == {0}
    assert all(memory > 10 for memory in measured[1])
    one, other = timeless(one), timeless(other)
    assert one == other
    assert [type(event) for event in one].count(UnitFinished) == 3
    assert [unit for unit, _ in here.heard] == [unit for unit, _ in there.heard]
    assert timeless([event for _, event in there.heard]) == other


@pytest.mark.exhaustive
def test_processes_are_replaced_after_so_many_cases(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    executor = Spawned(1, running, recycle=20)
    start = executor._start
    monkeypatch.setattr(executor, "_start", lambda unit: started.append(unit) or start(unit))
    events = list(executor.execute(Queue(unit(), unit(seed=2))))
    assert len(started) == 2
    assert sum(event.tally.cases for event in events if isinstance(event, BatchFinished)) == 40


def test_a_process_that_dies_is_a_finding_and_the_others_go_on(running: Path) -> None:
    plan = Queue(unit("Dying"), unit("Sound"))
    events = list(Spawned(2, running).execute(plan))
    (died,) = (event for event in events if isinstance(event, WorkerDied))
    (found,) = (event for event in events if isinstance(event, FindingFound))
    assert died.cause == "was killed by SIGSEGV"
    assert found.finding.invariant == PROCESS_SURVIVES
    assert found.finding.violation.message == "the process was killed by SIGSEGV while it ran this scenario"
    scenario = check(found.finding.scenario)
    assert scenario == died.scenario
    assert any(step.contexts and step.generations for step in scenario.steps)
    assert [event.worker for event in events if isinstance(event, UnitFinished)] == ["MTPEagleWorker"]


def test_a_sigkill_is_never_the_engines_own(tmp_path: Path) -> None:
    (died,) = Spawned(1, tmp_path).execute(Queue(unit("Killed")))
    assert isinstance(died, WorkerDied)
    assert died.killed
    (journal,) = tmp_path.iterdir()
    assert read_case(journal) is not None


def test_an_end_without_a_word_is_a_finding(running: Path) -> None:
    died, found = Spawned(1, running).execute(Queue(unit("Quitting")))
    assert isinstance(died, WorkerDied)
    assert not died.killed
    assert isinstance(found, FindingFound)
    assert found.finding.violation.message == "the process ended with status 0 while it ran this scenario"


@pytest.mark.exhaustive(every=2, first=1)
@pytest.mark.parametrize("make", [InProcess, lambda running: Spawned(1, running)], ids=["here", "spawned"])
def test_a_system_exit_is_a_finding_and_the_search_goes_on(make: Callable[[Path], Executor], running: Path) -> None:
    events = list(make(running).execute(Queue(unit("Exiting", max_cases=60))))
    (found,) = (event.finding for event in events if isinstance(event, FindingFound))
    assert found.invariant == PROCESS_SURVIVES
    message = f"SystemExit: enough (at {found.raised_at}) ends the process that runs this scenario"
    assert found.violation.message == message
    assert sum(event.tally.cases for event in events if isinstance(event, BatchFinished)) == 60
    assert len(found.scenario.steps) <= 2, "it is shrunk"


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_from_outside_is_no_finding(
    number: int, tmp_path: Path, eventually: Eventually
) -> None:
    store = Store(tmp_path)

    def kill() -> None:
        eventually(lambda: any(read_case(path) for path in store.running.glob("*.json")))
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, number)

    killer = threading.Thread(target=kill)
    killer.start()
    (died,) = Spawned(1, store.running).execute(Queue(unit("Slow")))
    killer.join()
    assert isinstance(died, WorkerDied)
    assert died.cause == f"was killed by {signal.Signals(number).name}"
    assert died.killed
    # Unless it struck between two cases.
    assert [read_subject(path).scenario for path in store.take_interrupted()] == [died.scenario][: bool(died.scenario)]


@pytest.mark.exhaustive
def test_a_process_that_hangs_is_killed(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silence = executors._Member.silence
    # However long a busy machine takes to start a process, that is not what is meant here.
    monkeypatch.setattr(executors._Member, "silence", lambda m: silence(m) if read_case(m.journal) else 0.0)
    events = list(Spawned(1, running, stall=2.0).execute(Queue(unit("Hanging"))))
    (found,) = (event for event in events if isinstance(event, FindingFound))
    assert "gave no sign of life for 2 s" in found.finding.violation.message


def test_a_process_whose_events_wait_to_be_read_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(encode(UnitFinished(worker="PARDWorker")))
    process: Any = None
    spawned = Spawned(1, tmp_path, stall=0.0)
    spawned._members.append(executors._Member(process, ours, tmp_path / "none.json", unit(), heard=-1.0))
    # They arrived since it was last asked who has sent some.
    monkeypatch.setattr(executors, "wait", lambda connections, timeout: [])
    assert list(spawned._listen()) == []


@pytest.mark.exhaustive
def test_a_process_that_dies_before_its_first_case_is_an_error_of_the_suite(running: Path) -> None:
    died, error = Spawned(1, running).execute(Queue(unit("Stillborn")))
    assert isinstance(died, WorkerDied)
    assert isinstance(error, HarnessError)
    assert error.message == "a process ended with status 7 before it ran a scenario"


@pytest.mark.exhaustive
def test_whoever_stops_listening_ends_the_processes(running: Path) -> None:
    events = Spawned(2, running).execute(Queue(unit("Sound"), unit("Slow", max_cases=1000)))
    # The first event comes after a batch of the quick one; the other process is in the middle of its own.
    next(events)
    assert multiprocessing.active_children()
    events.close()
    assert multiprocessing.active_children() == []


def test_exit_statuses_in_words() -> None:
    assert how_it_ended(-11) == "was killed by SIGSEGV"
    assert how_it_ended(-40) == "was killed by signal 40"
    assert how_it_ended(None) == "closed its connection and did not end"
    assert how_it_ended(3) == "ended with status 3"


@pytest.mark.parametrize("make", [InProcess, lambda running: Spawned(1, running)], ids=["here", "spawned"])
def test_a_finding_is_on_disk_until_it_is_stored(make: Callable[[Path], Executor], running: Path) -> None:
    noted = []
    for event in make(running).execute(Queue(unit("Forgetful", first=True))):
        (journal,) = running.iterdir()
        noted.append((type(event), read_case(journal) is not None))
    # When it is heard, nobody has stored it yet: were all killed now, the case would be listed as interrupted.
    assert noted == [(BatchFinished, True), (FindingFound, True), (UnitFinished, False)]
