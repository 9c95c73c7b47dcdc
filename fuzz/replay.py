"""Running one scenario again, and what came of it."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any

import fuzz.engines
from engines.base import run
from fuzz.alone import Caller, Died, death
from fuzz.audit import PROCESS_SURVIVES, Failure, ProcessEnded, audit, raised_at, surviving
from fuzz.executors import STALL_SECONDS
from fuzz.journal import Case
from fuzz.report import ERROR, FINDINGS, NOTHING_FOUND
from fuzz.subject import Subject
from invariants import Verdict, verify
from museum import seeded
from scenarios import Finding, Scenario, Trace, UsageError, Violation
from scenarios.codec import to_json


@dataclass(frozen=True)
class Replay:
    """The outcome. ``verdict`` is None when the process died; ``ended_at`` says at which line, where that is known.

    ``unsound`` says why the run proves nothing; its violations then count for nothing either.
    """

    subject: Subject
    violations: tuple[Violation, ...]
    verdict: Verdict | None = None
    unsound: Failure | None = None
    ended_at: str | None = None

    @property
    def status(self) -> int:
        """Exit status."""
        if self.unsound is not None:
            return ERROR
        return FINDINGS if self.violations else NOTHING_FOUND

    @property
    def reached(self) -> int:
        """Invariants that had something to say."""
        return 0 if self.verdict is None else sum(reached > 0 for reached, _ in self.verdict.counts.values())

    @property
    def finding(self) -> Finding | None:
        """The violation to show: of the invariant that was found before, else the first; None if it holds."""
        if not self.violations:
            return None
        subject = self.subject
        wanted = subject.finding.invariant if subject.finding is not None else None
        violation = next((v for v in self.violations if v.invariant == wanted), self.violations[0])
        return Finding(
            invariant=violation.invariant,
            engine=subject.engine,
            device=subject.device,
            scenario=subject.scenario,
            violation=violation,
            bug=subject.active_bug,
            raised_at=self.ended_at if self.verdict is None else raised_at(self.verdict.trace),
            seen_on=self._seen_on(violation.invariant),
        )

    def _seen_on(self, invariant: str) -> str | None:
        """Where it was found, if this is the same finding on the same device."""
        found = self.subject.finding
        return found.seen_on if found and (found.device, found.invariant) == (self.subject.device, invariant) else None

    def to_json(self) -> dict[str, Any]:
        """JSON object of the outcome."""
        return {
            "name": self.subject.name,
            "engine": self.subject.engine,
            "device": self.subject.device,
            "bug": self.subject.active_bug,
            "holds": self.status == NOTHING_FOUND,
            "reached": self.reached,
            "problem": None if self.unsound is None else self.unsound.message,
            "violations": [to_json(violation) for violation in self.violations],
            "recorded": None if self.subject.finding is None else _recorded(self.subject.finding),
        }


def _recorded(finding: Finding) -> dict[str, Any]:
    """What a finding's file says was wrong when it was found, without the scenario."""
    return {
        "engine": finding.engine,
        "device": finding.device,
        "bug": finding.bug,
        "violation": to_json(finding.violation),
        "raised_at": finding.raised_at,
        "seen_on": finding.seen_on,
    }


def replay(subject: Subject, *, only: tuple[str, ...] = ()) -> Replay:
    """Run the scenario in this process and ask the invariants, all or only those.

    ``UsageError`` if it cannot run here; one that is about no option names the subject.
    """
    return _named(subject, lambda: _replay(subject, only, _dies(subject)))


def replay_apart(caller: Caller, subject: Subject, *, only: tuple[str, ...] = ()) -> Replay:
    """The same in another process: its end, whatever the exit status, is a violation."""
    was_death = subject.finding is not None and subject.finding.invariant == PROCESS_SURVIVES
    try:
        # Any other finding has had an end once.
        seconds = STALL_SECONDS if was_death else None
        return _named(subject, lambda: caller.call(_replay, subject, only, seconds=seconds))
    except Died as died:
        if died.killed:
            raise UsageError(
                f"{subject.name}: the process that ran it was killed from outside: is memory short? Run it again"
            ) from died
        return _death(subject, str(died))


def _named(subject: Subject, run: Callable[[], Replay]) -> Replay:
    try:
        return run()
    except UsageError as error:
        message = str(error)
        raise UsageError(message if message.startswith("--") else f"{subject.name}: {message}") from error


def _dies(subject: Subject) -> str | None:
    """How a finding of a death ends a process of its own, None if it does not."""
    if subject.finding is None or subject.finding.invariant != PROCESS_SURVIVES:
        return None
    return death(Case(subject.engine, subject.device, subject.active_bug, subject.scenario), STALL_SECONDS)


def _death(subject: Subject, message: str, place: str | None = None) -> Replay:
    return Replay(subject, (Violation(invariant=PROCESS_SURVIVES, step=0, message=message),), ended_at=place)


def _replay(subject: Subject, only: tuple[str, ...], cause: str | None = None) -> Replay:
    if subject.active_bug is not None and subject.engine == fuzz.engines.TENSORRT_LLM:
        raise UsageError("--with-bug: defects are seeded into the portable engine; leave out --engine or the defect")
    engine = fuzz.engines.load(subject.engine, subject.device)
    if cause is not None:
        return _death(subject, cause)

    def execute(scenario: Scenario) -> Trace:
        with surviving():
            trace = run(engine, scenario)
        if any(s.fields.get("exception") == BdbQuit.__name__ for step in trace.steps for s in step.substeps):
            raise BdbQuit  # an engine takes it for a failure of the step
        return trace

    try:
        with seeded(subject.active_bug):
            verdict = verify(subject.scenario, execute, only=only or None)
    except ProcessEnded as ended:
        return _death(subject, str(ended), ended.raised_at)
    except BdbQuit:
        if parent_process() is None:
            raise KeyboardInterrupt from None  # whoever quits a debugger has seen enough
        raise UsageError("a breakpoint() needs a terminal; use `specfuzz replay --here`") from None
    unsound = audit(subject.scenario, verdict.trace)
    return Replay(subject, verdict.violations if unsound is None else (), verdict, unsound)
