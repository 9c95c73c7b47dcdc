"""Running a slice of a small scope: the search without the draws, point by point."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import NoReturn

from engines.base import Engine, run
from fuzz import interrupt
from fuzz.audit import SUITE_ERRORS, ProcessEnded, crash, surviving
from fuzz.events import BatchFinished, Events, HarnessError, Progress, Tally
from fuzz.journal import Journal
from fuzz.scope import ACCEPTANCES, MIXED, Cell, Point, Slice, asks, cells, sliced, variants_of
from fuzz.search import Batch, EndOfBatch, Search
from fuzz.unit import Unit
from invariants import all_invariants
from scenarios import Scenario, UsageError

_sites: dict[tuple[str, str, str | None, tuple[str, ...], Cell], Mapping[str, int]] = {}
"""Sites by engine, device, defect, families and cell: every slice of a worker goes through all of its cells."""


class Sweep(Search):
    """Runs one slice on an engine; findings are judged, shrunk and reported as a search does."""

    def __init__(self, unit: Unit, part: Slice, engine: Engine, journal: Journal | None = None) -> None:
        super().__init__(unit, engine, journal)
        self.part = part
        self.relations = {i: n for i, n in self.relations.items() if asks(i)}
        self.invariants = frozenset(i.slug for i in all_invariants() if i.slug in self.invariants and asks(i))
        self.acceptance = MIXED
        # A point that is begun is run whatever the time.
        self.until, self.deadline = self.deadline, float("inf")
        self.broken: list[HarnessError] = []
        """Cells whose sites could not be recorded."""

    def events(self) -> Events:
        """Run what is left of the slice, as far as cases and time allow; the findings of a batch come before it.

        A batch that has been heard of is thereby done in every respect, whenever the process is killed.
        """
        offered = variants_of(self.engine)
        within = cells(self.part.scope, self.unit.worker, self.engine.backends, offered)
        points = list(sliced(self.part, within, self._passes))
        yield from self.broken
        done = self.part.done
        last = min(len(points), done + self.unit.max_cases)
        while True:
            started, refused = time.monotonic(), self.refusals.total()
            batch, tried, fired = Batch(), Counter[str](), Counter[str]()
            while done < last and batch.failure is None and not (self.cases and time.monotonic() >= self.until):
                self._try(batch, points[done], tried, fired)
                done += 1
            with nullcontext() if batch.scenario is None else self._noted(batch.scenario):
                yield from list(self._results(batch))
                yield BatchFinished(
                    worker=self.unit.worker,
                    bug=self.unit.bug,
                    tally=batch.tally + Tally(seconds=time.monotonic() - started),
                    progress=Progress(
                        slice=replace(self.part, done=done),
                        complete=done == len(points),
                        points=+tried,
                        fired=+fired,
                        refused=self.refusals.total() - refused,
                    ),
                )
            if batch.failure is None or done == last:
                return

    def _try(self, batch: Batch, point: Point, tried: Counter[str], fired: Counter[str]) -> None:
        """Run a point; a failure that is not known yet is noted in the batch."""
        before = batch.tally
        self.acceptance = point.acceptance
        with suppress(EndOfBatch):
            self._case(batch, point.scenario)
        site = "" if point.fault is None else point.fault.site
        tried[site] += batch.tally.cases - before.cases
        fired[site] += batch.tally.fired - before.fired

    def _relation(self, scenario: Scenario) -> frozenset[str]:
        """A twin costs half as much as all the rest, so every third point has one."""
        return super()._relation(scenario) if self.acceptance == MIXED else frozenset()

    def _refuse(self, error: UsageError) -> NoReturn:
        """Pass over a point that the engine cannot drive."""
        self.refusals[str(error)] += 1
        raise EndOfBatch

    def _passes(self, cell: Cell) -> Mapping[str, int]:
        """How often the step under test of a cell passes each site; nothing where it does not end well."""
        if not self.unit.faults:
            return {}
        key = self.unit.engine, self.unit.device, self.unit.bug, self.unit.faults, cell
        if key not in _sites:
            _sites[key] = self._recorded(cell)
        return _sites[key]

    def _recorded(self, cell: Cell) -> Mapping[str, int]:
        # Which sites a step passes depends on its shape alone, and not on what follows.
        whole = cell.scenario(ACCEPTANCES[0])
        scenario = replace(whole, steps=whole.steps[: cell.lead + 1])
        interrupt.check()
        try:
            with self._noted(scenario), surviving():
                steps = run(self.engine, scenario, observe=False, record=self.unit.faults).steps
        except (UsageError, ProcessEnded):
            return {}  # its clean point is refused likewise, or ends likewise
        except SUITE_ERRORS as error:
            self._break(crash(error).key, crash(error).message, scenario)
            return {}
        return steps[cell.lead].sites if len(steps) > cell.lead and steps[cell.lead].outcome == "ok" else {}

    def _break(self, key: str, message: str, scenario: Scenario) -> None:
        if key not in self.known:
            self.known.add(key)
            self.broken.append(self._error(key, message, scenario))
