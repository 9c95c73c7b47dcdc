"""Where units run: in this process, or in spawned ones. A plan hands units out and hears what became of them.

Units and events cross as JSON. Another executor needs ``execute`` only: ask the plan for units, run each with
``work.run_unit`` anywhere, tell the plan each event and yield it.

Processes are spawned, never forked, as a fork does not survive CUDA. Each is replaced after so many cases,
as Hypothesis and the engine grow over a long run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final, Protocol

import fuzz.engines
from fuzz import interrupt, reach
from fuzz.alone import PATIENCE, death, follow_parent, how_it_ended
from fuzz.audit import PROCESS_SURVIVES
from fuzz.events import (
    BatchFinished,
    Event,
    Events,
    FindingFound,
    HarnessError,
    Tally,
    UnitFinished,
    WorkerDied,
    decode,
    encode,
)
from fuzz.files import unique
from fuzz.journal import Case, Journal, read_case
from fuzz.memory import peak_mib
from fuzz.unit import Unit
from fuzz.unit import decode as decode_unit
from fuzz.unit import encode as encode_unit
from scenarios import Finding, Violation

RECYCLE_CASES: Final = 5000
"""Cases after which a process is replaced."""
STALL_SECONDS: Final = 120.0
"""Time without a new case or event after which a process is taken for hung."""
FROM_OUTSIDE: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that others send, as a rule. SIGKILL is always from outside, for instance where memory is short."""


class Plan(Protocol):
    """What is to be done, decided unit by unit."""

    def next(self) -> Unit | None:
        """The next unit, None when there is none until a running one has finished."""
        ...

    def observe(self, unit: Unit, event: Event) -> None:
        """Hear an event of a unit, each before the next unit is asked for."""
        ...


class Executor(Protocol):
    """Runs the units of a plan."""

    def execute(self, plan: Plan) -> Events:
        """Run units until the plan has no more; yields their events."""
        ...


class InProcess:
    """Runs units one after the other in this process. ``running`` is the folder of its journal."""

    def __init__(self, running: Path) -> None:
        self.running = running

    def execute(self, plan: Plan) -> Events:
        """See ``Executor``."""
        from fuzz.work import run_unit

        journal = Journal(self.running / f"{unique()}.json")
        try:
            while (unit := plan.next()) is not None:
                for event in run_unit(unit, journal):
                    plan.observe(unit, event)
                    yield event
        finally:
            journal.close()


def serve(connection: Connection, running: str) -> None:
    """Body of a spawned process: units in, events out, until the other end closes."""
    fuzz.engines.settle_process()
    from fuzz.work import run_unit

    fuzz.engines.quieten()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    threading.Thread(target=follow_parent, daemon=True).start()
    journal = Journal(Path(running))
    first = 0
    try:
        while True:
            for event in run_unit(decode_unit(connection.recv_bytes()), journal):
                if isinstance(event, BatchFinished):
                    memory = peak_mib()
                    first = first or memory
                    event = replace(event, tally=event.tally + Tally(memory=memory, grown=memory - first))
                connection.send_bytes(encode(event))
                if isinstance(event, FindingFound):
                    connection.recv_bytes()  # it is stored: now its case can be forgotten
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        journal.close()


@dataclass
class _Member:
    """A spawned process with the unit that it is running."""

    process: SpawnProcess
    connection: Connection
    journal: Path
    unit: Unit
    cases: int = 0
    heard: float = field(default_factory=time.monotonic)

    def give(self, unit: Unit) -> None:
        """Send it a unit to run."""
        self.unit = unit
        self.heard = time.monotonic()
        with suppress(OSError):  # whoever listens will notice that it has died
            self.connection.send_bytes(encode_unit(unit))

    def acknowledge(self) -> None:
        """Tell it that its finding has been stored."""
        with suppress(OSError):  # as above, and where the finding is its own death
            self.connection.send_bytes(b"")

    def silence(self) -> float:
        """Seconds since it last gave a sign of life: an event or a case begun."""
        try:
            begun = time.time() - self.journal.stat().st_mtime
        except OSError:
            begun = float("inf")
        return min(begun, time.monotonic() - self.heard)

    def dismiss(self) -> None:
        """End a process that has no unit."""
        self.connection.close()
        self.process.join()
        self.process.close()

    def kill(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.process.close()


class Spawned:
    """Runs units in up to ``count`` processes, with their journals in the folder ``running``."""

    def __init__(
        self, count: int, running: Path, *, recycle: int = RECYCLE_CASES, stall: float = STALL_SECONDS
    ) -> None:
        self.count = count
        self.running = running
        self.recycle = recycle
        self.stall = stall
        self._members: list[_Member] = []

    def execute(self, plan: Plan) -> Events:
        """See ``Executor``."""
        try:
            while True:
                while len(self._members) < self.count and (unit := plan.next()) is not None:
                    self._start(unit)
                if not self._members:
                    return
                for member, event in self._listen():
                    plan.observe(member.unit, event)
                    yield event
                    if isinstance(event, FindingFound):
                        member.acknowledge()
                    if isinstance(event, UnitFinished):
                        self._go_on(member, plan)
        finally:
            for member in self._members:
                member.kill()
                member.journal.unlink(missing_ok=True)
            self._members.clear()

    def _start(self, unit: Unit) -> None:
        # The processes share the cores; a thread pool in each would have them fight.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        journal = self.running / f"{unique()}.json"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, str(journal)), daemon=True)
        process.start()
        theirs.close()
        member = _Member(process, ours, journal, unit)
        self._members.append(member)
        member.give(unit)

    def _go_on(self, member: _Member, plan: Plan) -> None:
        """Give a process that has finished its unit another one, or end it."""
        unit = plan.next() if member.cases < self.recycle else None
        if unit is not None:
            member.give(unit)
        else:
            self._members.remove(member)
            member.dismiss()

    def _listen(self) -> Iterator[tuple[_Member, Event]]:
        """Events that have arrived, after waiting a little for some; deaths among them."""
        interrupt.check()
        ready = wait([member.connection for member in self._members], timeout=0.5)
        for member in list(self._members):
            if member.connection in ready:
                try:
                    event = decode(member.connection.recv_bytes())
                except (EOFError, OSError):
                    yield from self._bury(member, None)
                    continue
                member.heard = time.monotonic()
                if isinstance(event, BatchFinished):
                    member.cases += event.tally.cases
                yield member, event
            # What another one's burial took may have kept its events waiting.
            elif member.silence() > self.stall and not member.connection.poll():
                yield from self._bury(member, f"gave no sign of life for {self.stall:g} s")

    def _bury(self, member: _Member, cause: str | None) -> Iterator[tuple[_Member, Event]]:
        """A dead or hung process: what it was running becomes a finding, unless somebody else has killed it."""
        self._members.remove(member)
        if cause is None:
            member.process.join(PATIENCE)  # the pipe closes a moment before the exit status is there
            cause = how_it_ended(member.process.exitcode)
        number = -(member.process.exitcode or 0)
        member.kill()
        unit, case = member.unit, read_case(member.journal)
        scenario = None if case is None else case.scenario
        killed = self._is_from_outside(number, case)
        yield member, WorkerDied(worker=unit.worker, bug=unit.bug, cause=cause, scenario=scenario, killed=killed)
        if killed:
            # The innocent case stays in the journal, and is listed as interrupted.
            return
        member.journal.unlink(missing_ok=True)
        if scenario is None:
            message = f"a process {cause} before it ran a scenario"
            yield member, HarnessError(worker=unit.worker, bug=unit.bug, key=message, message=message)
            return
        violation = Violation(
            invariant=PROCESS_SURVIVES, step=0, message=f"the process {cause} while it ran this scenario"
        )
        finding = Finding(
            invariant=PROCESS_SURVIVES,
            engine=unit.engine,
            device=unit.device,
            scenario=scenario,
            violation=violation,
            bug=unit.bug,
            seen_on=reach.of_death(unit.engine, unit.device, unit.bug, scenario, self.stall),
        )
        yield member, FindingFound(finding=finding, cases=0)

    def _is_from_outside(self, number: int, case: Case | None) -> bool:
        """Whether the signal was sent by somebody else, and not by the case that was running."""
        if number == signal.SIGKILL:
            return True  # of what does it to itself nobody could tell it from the system, where memory is short
        return number in FROM_OUTSIDE and (case is None or death(case, self.stall) is None)
