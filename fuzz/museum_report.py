"""What the hunt for seeded defects amounts to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fuzz.events import BatchFinished, CampaignFinished, Event, FindingFound, HarnessError, Tally
from fuzz.report import ERROR, FINDINGS, NOTHING_FOUND, interrupted_line, table
from museum import Bug


@dataclass
class MuseumSummary:
    """The events of a hunt, added up per defect.

    baseline  the same hunt with scenarios drawn without aim, None without one
    """

    bugs: Sequence[Bug]
    baseline: MuseumSummary | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)
    found: dict[str, FindingFound] = field(default_factory=dict)
    errors: list[HarnessError] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    finished: bool = False

    def feed(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, BatchFinished) and event.bug is not None:
            self.tallies[event.bug] = self.tallies.get(event.bug, Tally()) + event.tally
        elif isinstance(event, FindingFound) and event.finding.bug is not None:
            self.found[event.finding.bug] = event
        elif isinstance(event, HarnessError):
            self.errors.append(event)
        elif isinstance(event, CampaignFinished):
            self.finished = True

    @property
    def problems(self) -> list[str]:
        """Why a defect that was not found proves nothing, one sentence each."""
        problems = list(dict.fromkeys(f"{error.bug or error.worker}: {error.message}" for error in self.errors))
        if not self.finished:
            problems.append("cut short before its budget was spent")
        plain = [] if self.baseline is None else self.baseline.problems
        return problems + [f"drawn without aim: {problem}" for problem in plain]

    @property
    def status(self) -> int:
        """Exit status: here it is a finding about the suite when a defect escapes."""
        if self.problems:
            return ERROR
        return NOTHING_FOUND if len(self.found) == len(self.bugs) else FINDINGS

    def to_json(self) -> dict[str, Any]:
        """JSON document of the hunt."""
        return {
            "found": len(self.found),
            "total": len(self.bugs),
            "median": self._medians(),
            "bugs": [self._row(bug) for bug in self.bugs],
            **({} if self.baseline is None else {"baseline": self.baseline.to_json()}),
            "interrupted": self.interrupted,
            "problems": self.problems,
        }

    def _row(self, bug: Bug) -> dict[str, Any]:
        tally = self.tallies.get(bug.id, Tally())
        event = self.found.get(bug.id)
        scenario = None if event is None else event.finding.scenario
        return {
            "id": bug.id,
            "kind": bug.kind,
            "worker": bug.worker,
            "found": event is not None,
            "invariant": None if event is None else event.finding.invariant,
            "cases": tally.cases,
            "seconds": round(tally.seconds, 3),
            "requests": None if scenario is None else len(scenario.requests),
            "steps": None if scenario is None else len(scenario.steps),
            "finding": None if event is None else event.finding.id,
        }

    def _medians(self) -> dict[str, float | None]:
        """Cases and seconds of the defect in the middle; None where that one was not found."""
        rows = [self._row(bug) for bug in self.bugs]
        medians: dict[str, float | None] = {}
        for name in ("cases", "seconds"):
            middle = median(row[name] if row["found"] else float("inf") for row in rows)
            medians[name] = None if middle == float("inf") else round(middle, 3)
        return medians

    def _median(self) -> str:
        cases, seconds = self._medians().values()
        return "not found" if cases is None or seconds is None else f"{cases:g} cases, {seconds:.1f} s"

    def lines(self) -> Iterator[str]:
        """The hunt as a person reads it."""
        head = ("defect", "kind", "found by", "cases", "seconds", "requests", "steps", "finding")
        compared = () if self.baseline is None else ("without aim", "cases", "seconds")
        rows = []
        for bug in self.bugs:
            row = self._row(bug)
            shown = (row["kind"], row["invariant"], row["cases"], row["seconds"], row["requests"], row["steps"])
            values = [row["id"], *shown, row["finding"]]
            if self.baseline is not None:
                plain = self.baseline._row(bug)
                values += ["found" if plain["found"] else "not found", plain["cases"], plain["seconds"]]
            rows.append(tuple("-" if value is None else value for value in values))
        yield from table((*head, *compared), rows)
        yield ""
        for path in self.interrupted:
            yield interrupted_line(path)
        for problem in self.problems:
            yield f"problem: {problem}"
        if self.found:
            example = next(iter(self.found.values())).finding.id
            yield f"each with its timeline: specfuzz explain FINDING, for instance specfuzz explain {example}"
        yield f"{len(self.found)} of {len(self.bugs)} seeded defects found"
        if self.baseline is not None:
            yield f"median: {self._median()}"
            found = len(self.baseline.found)
            yield f"drawn without aim: {found} of {len(self.bugs)} found, median: {self.baseline._median()}"
