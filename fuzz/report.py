"""What a campaign amounts to: a summary that is fed its events, as text and as JSON, and the exit status."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fuzz import engines
from fuzz.causes import cause_lines, probable_causes
from fuzz.events import (
    BatchFinished,
    CampaignFinished,
    CampaignStarted,
    Event,
    FindingFound,
    HarnessError,
    Tally,
)
from fuzz.memory import GROWTH_MIB, MOST_MIB
from invariants.registry import RELATION, Invariant
from scenarios import WORKERS, Finding, Violation, scenario_to_json

NOTHING_FOUND, FINDINGS, ERROR = 0, 1, 2
"""Exit statuses: nothing found; findings; usage, environment, the suite's own error, or nothing was verified."""
_MANY: Final = 2000
"""Scenarios from which on a run must have found a pair for each relation: of 1,000 the rarest ones often have none."""
_MORE: Final = {"run": "raise --max-cases", "fuzz": "raise --max-time", "sweep": "widen its scope"}
"""How each command is made to run more, or other, scenarios."""


@dataclass
class Summary:
    """The events of a campaign, added up.

    invariants  those that are asked
    named       whether a person named them: each must then be reached, else each that the engine shows enough for
    """

    invariants: Sequence[Invariant] = ()
    named: bool = False
    start: CampaignStarted | None = None
    workers: dict[str, Tally] = field(default_factory=dict)
    found: list[FindingFound] = field(default_factory=list)
    errors: list[HarnessError] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    """Scenario files of cases whose process ended before a verdict, in this campaign or an earlier one."""
    seconds: float | None = None
    """Time of the whole campaign; None while it runs, and if it was cut short."""

    def feed(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, CampaignStarted):
            self.start = event
            self.workers = {worker: Tally() for worker in event.workers}
        elif isinstance(event, BatchFinished):
            self.workers[event.worker] = self.workers.get(event.worker, Tally()) + event.tally
        elif isinstance(event, FindingFound):
            self.found.append(event)
        elif isinstance(event, HarnessError):
            self.errors.append(event)
        elif isinstance(event, CampaignFinished):
            self.seconds = event.seconds

    @property
    def total(self) -> Tally:
        """All workers together."""
        return sum(self.workers.values(), Tally())

    @property
    def unreached(self) -> list[str]:
        """Invariants that had nothing to say, though the engine and these workers show what they look at."""
        return self._silent(shown=True, rare=False)

    @property
    def unmet(self) -> list[str]:
        """Relations that found no scenario with a twin, among too few scenarios for that to mean anything."""
        return self._silent(shown=True, rare=True)

    @property
    def unobservable(self) -> list[str]:
        """Invariants that had nothing to say because no scenario showed what they look at.

        The engine cannot, these workers do not, or there were too few scenarios.
        """
        return self._silent(shown=False)

    def _silent(self, *, shown: bool, rare: bool | None = None) -> list[str]:
        """Invariants that had nothing to say.

        shown  those whose fields some scenario showed, or the others
        rare   relations that too few scenarios have been asked for, or the others; None for both
        """
        total = self.total
        if self.seconds is None:
            return []  # it may have had no time to show or to reach them
        silent = [i for i in self.invariants if not total.reached.get(i.slug)]
        slugs = [i for i in silent if (self.named or self._shown(i, total.observed)) is shown]
        few = total.cases < _MANY and not self.named
        return [i.slug for i in slugs if rare is None or (few and i.kind == RELATION) is rare]

    def _shown(self, invariant: Invariant, observed: Collection[str]) -> bool:
        if invariant.trait and not any(getattr(WORKERS[worker], invariant.trait) for worker in self.workers):
            return False
        shown = [name in observed for name in invariant.reads]
        # A relation compares whatever both runs show.
        return any(shown) if invariant.kind == RELATION else all(shown)

    @property
    def idle(self) -> list[str]:
        """Workers for which nothing was executed."""
        return [worker for worker, tally in self.workers.items() if tally.cases == 0]

    @property
    def problems(self) -> list[str]:
        """Why the campaign proves nothing even where it found nothing, one sentence each."""
        total = self.total
        problems = list(dict.fromkeys(f"{error.worker}: {error.message}" for error in self.errors))
        if total.fired != total.planned:
            problems.append(f"faults: {total.fired} fired of {total.planned} planned")
        if (
            total.memory > MOST_MIB
            and total.grown > GROWTH_MIB
            and self.start is not None
            and self.start.device == "cpu"
        ):
            had = (
                f"memory: a process had {total.memory} MiB resident, {total.grown} more than after its first scenarios"
            )
            problems.append(f"{had}; it should be {MOST_MIB} at most")
        if self.seconds is None:
            # What it has not come to is nobody's fault.
            return [*problems, "cut short before its budget was spent"]
        idle = self.idle
        if not total.cases:
            problems.append("nothing was executed")
        elif idle:
            problems.append(f"nothing was executed for {', '.join(idle)}; {self._more}")
        if total.cases and self.unreached:
            others = "ask others with --invariant"
            problems.append(f"never reached: {', '.join(self.unreached)}; {self._more}, or {others}")
        return problems

    @property
    def _more(self) -> str:
        """What to change to have more scenarios."""
        return _MORE["run" if self.start is None else self.start.command]

    @property
    def status(self) -> int:
        """Exit status. Findings stand whatever else went wrong."""
        if self.found:
            return FINDINGS
        return ERROR if self.problems else NOTHING_FOUND

    def to_json(self) -> dict[str, Any]:
        """JSON document of the campaign."""
        assert self.start is not None
        total = self.total
        return {
            "engine": self.start.engine,
            "device": self.start.device,
            "seed": self.start.seed,
            "cases": total.cases,
            "steps": total.steps,
            "seconds": round(total.seconds if self.seconds is None else self.seconds, 3),
            "faults": {"planned": total.planned, "fired": total.fired},
            "invariants": {
                slug: {"reached": total.reached.get(slug, 0), "held": total.held.get(slug, 0)} for slug in self._slugs
            },
            "unobservable": self.unobservable,
            "workers": {
                worker: {"cases": t.cases, "steps": t.steps, "memory_mib": t.memory or None}
                for worker, t in self.workers.items()
            },
            "findings": [finding_document(event) for event in self.found],
            "causes": [cause._asdict() for cause in probable_causes(self.found)],
            "interrupted": self.interrupted,
            "problems": self.problems,
        }

    def lines(self) -> Iterator[str]:
        """The summary as a person reads it."""
        assert self.start is not None
        total, seconds = self.total, self.seconds
        took = "cut short" if seconds is None else f"{seconds:.1f} s"
        yield f"{self.start.engine} on {self.start.device}, seed {self.start.seed}, {took}"
        executed = f"{counted(total.cases, 'scenario')}, {counted(total.steps, 'step')}"
        yield f"{executed}, faults fired {total.fired}/{total.planned}"
        yield ""
        yield from table(
            ("worker", "scenarios", "steps", "faults", "seconds"),
            [(w, t.cases, t.steps, f"{t.fired}/{t.planned}", f"{t.seconds:.1f}") for w, t in self.workers.items()],
        )
        yield ""
        yield from table(
            ("invariant", "reached", "held"),
            [
                (slug, total.reached.get(slug, 0), total.held.get(slug, 0))
                for slug in self._slugs
                if seconds is not None or slug in total.reached
            ],
        )
        if self.unmet:
            yield f"nothing to compare in so few scenarios: {', '.join(self.unmet)}"
        if self.unobservable:
            yield f"without a scenario that shows what they look at: {', '.join(self.unobservable)}"
        yield ""
        for event in self.found:
            yield from finding_lines(event)
            yield ""
        yield from cause_lines(self.found)
        for path in self.interrupted:
            yield interrupted_line(path)
        for problem in self.problems:
            yield f"problem: {problem}"
        yield self.verdict

    @property
    def _slugs(self) -> list[str]:
        return list(dict.fromkeys((*(i.slug for i in self.invariants), *self.total.reached)))

    @property
    def verdict(self) -> str:
        """One line."""
        if self.found:
            return f"{counted(len(self.found), 'finding')}"
        return "no verdict" if self.problems else "nothing found"


def interrupted_line(path: str) -> str:
    """What is known of a case that its process did not survive, and how to run it again."""
    options = ""
    with suppress(OSError, ValueError):
        case = json.loads(Path(path).read_text())
        options += " --with-bug" if case.get("bug") else ""
        options += "" if case.get("engine") in engines.ENGINES else f" --engine {case.get('engine')}"
    return f"interrupted: a process ended in this case before its verdict: specfuzz replay {path}{options}"


def finding_document(event: FindingFound) -> dict[str, Any]:
    """JSON object of a finding, with how to see it again."""
    finding = event.finding
    violation = finding.violation
    return {
        "id": finding.id,
        "invariant": finding.invariant,
        "worker": finding.scenario.config.worker,
        "bug": finding.bug,
        "step": violation.step,
        "substep": violation.substep,
        "run": violation.run,
        "field": violation.field,
        "expected": violation.expected,
        "actual": violation.actual,
        "message": violation.message,
        "raised_at": finding.raised_at,
        "seen_on": finding.seen_on,
        "also": list(event.also),
        "cases": event.cases,
        "scenario": scenario_to_json(finding.scenario),
        "reproduce": reproduce(finding),
    }


def finding_lines(event: FindingFound) -> Iterator[str]:
    """A finding as a person reads it, ending with the line that reproduces it."""
    finding = event.finding
    yield f"{finding.id}  {finding.invariant}  {finding.scenario.config.worker}"
    yield f"    {place(finding.violation)}: {finding.violation.message}"
    if finding.seen_on is not None:
        yield f"    {finding.seen_on}"
    if finding.raised_at is not None:
        yield f"    raised at {finding.raised_at}"
    if event.also:
        yield f"    also violated by the same scenario: {', '.join(event.also)}"
    yield f"    {reproduce(finding)}"


def reproduce(finding: Finding) -> str:
    """The command that shows a stored finding again."""
    # A file may not choose whose code runs, see ``subject``.
    own = "" if finding.engine in engines.ENGINES else f" --engine {finding.engine}"
    return f"specfuzz explain {finding.id}{own}"


def place(violation: Violation) -> str:
    """Where in the trace a violation is."""
    where = f"steps[{violation.step}]"
    if violation.substep is not None:
        where += f" {violation.substep}"
    return f"{where} of run {violation.run}" if violation.run else where


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> Iterator[str]:
    """Columns, with numbers to the right."""
    lines = [tuple(map(str, row)) for row in (head, *rows)]
    columns = []
    for column in zip(*lines):
        width = max(map(len, column))
        numbers = all(re.fullmatch(r"[\d./]+|-", cell) for cell in column[1:])
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    for line in zip(*columns):
        yield "  ".join(line).rstrip()


def counted(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
