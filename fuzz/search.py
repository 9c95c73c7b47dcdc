"""The search: Hypothesis drives one unit of work, batch by batch.

A batch is one Hypothesis run. Its first failure ends the generation and becomes what the batch shrinks: from then
on only that one invariant is checked, so that shrinking neither slips to another violation nor pays for the rest.
Afterwards the invariant is excluded, with all others that the shrunk scenario violates too, and the search goes
on with the next batch until the budget is spent.

Every Hypothesis setting is explicit, as its profiles differ between a terminal and CI.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, Unsatisfiable

from engines.base import Engine, run
from fuzz.audit import FAULT_SURFACES, SUITE_ERRORS, Failure, audit, crash, planned_faults, raised_at
from fuzz.events import BatchFinished, Event, Events, FindingFound, HarnessError, Tally
from fuzz.journal import Case, Journal
from invariants import Relation, Verdict, all_invariants, verify
from scenarios import Finding, Scenario, Trace, dumps
from strategies import faulted_scenarios, scenarios

if TYPE_CHECKING:
    from fuzz.unit import Unit

BATCH: Final = 100
"""Most cases of a batch: how often a campaign hears of its progress."""
SHRINKS: Final = 600
"""Most runs made to shrink one failure."""
SHRINK_SECONDS: Final = 10.0
"""Most seconds spent on it, where the unit has a time limit."""
EMPTY_BATCHES: Final = 3
"""Batches in a row without a case after which the search gives up."""
MAX_DRAFT_LEN: Final = 7
"""Largest Kmax where none is asked for."""


class Departure(Exception):
    """Tells Hypothesis that a case failed. A subclass per failure, so that it tells one from another."""


class StopSearch(BaseException):
    """Ends a Hypothesis run at once: no ``Exception``, so that Hypothesis does not take it for a failing case."""


@dataclass
class Batch:
    """What one Hypothesis run does. ``target`` is the failure that it shrinks, ``best`` its smallest scenario."""

    tally: Tally = field(default_factory=Tally)
    target: Failure | None = None
    best: Scenario | None = None
    sites: dict[Scenario, Mapping[str, int]] = field(default_factory=dict)
    """Recorded fault sites of the last step of a scenario."""
    shrinks: int = 0
    shrink_until: float = float("inf")


class Search:
    """Searches one unit on an engine. ``journal`` is told each scenario before the engine is given it."""

    def __init__(self, unit: Unit, engine: Engine, journal: Journal | None = None) -> None:
        self.unit = unit
        self.engine = engine
        self.journal = journal
        self.known = set(unit.exclude)
        self.cases = 0
        asked = [i for i in all_invariants() if not unit.invariants or i.slug in (*unit.invariants, FAULT_SURFACES)]
        self.invariants = frozenset(i.slug for i in asked)
        self.relations = {i: 0 for i in asked if isinstance(i, Relation)}
        """Relations, and how often each was asked."""
        self.deadline = float("inf") if unit.max_seconds is None else time.monotonic() + unit.max_seconds

    def events(self) -> Events:
        """Search until the budget is spent, or something is found where the unit asks for the first only."""
        number = empty = 0
        while self.cases < self.unit.max_cases and time.monotonic() < self.deadline and empty < EMPTY_BATCHES:
            started = time.monotonic()
            batch = self._hunt(number)
            results = list(self._results(batch))
            seconds = Tally(seconds=time.monotonic() - started)
            yield BatchFinished(worker=self.unit.worker, bug=self.unit.bug, tally=batch.tally + seconds)
            yield from results
            if self.unit.first and any(isinstance(r, FindingFound) for r in results):
                return
            number += 1
            empty = 0 if batch.tally.cases else empty + 1

    def _hunt(self, number: int) -> Batch:
        """One Hypothesis run."""
        batch = Batch()

        @seed(self.unit.seed * 1_000_003 + number)
        @settings(
            max_examples=min(BATCH, self.unit.max_cases - self.cases),
            database=None,
            deadline=None,
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
            report_multiple_bugs=False,
            stateful_step_count=1,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            backend="hypothesis",
        )
        @given(self._cases(batch))
        def case(scenario: Scenario) -> None:
            self._case(batch, scenario)

        try:
            case()
        except (Departure, StopSearch, Unsatisfiable):
            pass
        except HypothesisException as error:
            # For instance a case that failed and then passed: what failed is judged once more by the caller.
            batch.target = batch.target or crash(error)
        return batch

    def _cases(self, batch: Batch) -> st.SearchStrategy[Scenario]:
        """Scenarios, clean or with a fault."""
        unit = self.unit
        most = MAX_DRAFT_LEN if unit.max_draft_len is None else unit.max_draft_len
        kinds = [scenarios(workers=(unit.worker,), max_draft_len=most)]
        if unit.faults:

            def record(scenario: Scenario) -> Mapping[str, int]:
                return self._record(batch, scenario)

            kinds.append(faulted_scenarios(record=record, workers=(unit.worker,), max_draft_len=most))
        return st.one_of(kinds)

    def _record(self, batch: Batch, scenario: Scenario) -> Mapping[str, int]:
        """The fault sites of the last step."""
        self._tick(batch)
        # While shrinking, Hypothesis asks again and again about the same steps before the fault.
        sites = batch.sites.get(scenario)
        if sites is None:
            try:
                steps = self._run(scenario, record=self.unit.faults).steps
            except SUITE_ERRORS as error:
                self._fail(batch, crash(error), scenario)
                reject()
            sites = batch.sites[scenario] = steps[-1].sites if len(steps) == len(scenario.steps) else {}
        return sites

    def _run(self, scenario: Scenario, record: tuple[str, ...] = ()) -> Trace:
        unit = self.unit
        noted = self.journal.case(Case(unit.engine, unit.device, unit.bug, scenario)) if self.journal else nullcontext()
        with noted:
            return run(self.engine, scenario, record=record)

    def _tick(self, batch: Batch) -> None:
        """End the run when its time is over."""
        now = time.monotonic()
        if batch.target is None:
            if now >= self.deadline:
                raise StopSearch
        elif batch.shrinks >= SHRINKS or now >= batch.shrink_until:
            raise StopSearch

    def _case(self, batch: Batch, scenario: Scenario) -> None:
        self._tick(batch)
        target = batch.target
        try:
            if target is None:
                failures = self._judge(batch, scenario)
            else:
                batch.shrinks += 1
                only = self.invariants - self.known if target.harness else frozenset((target.key,))
                failures = _failures(scenario, verify(scenario, self._run, only=only))
        except SUITE_ERRORS as error:
            failures = [crash(error)]
        for failure in failures:
            self._fail(batch, failure, scenario)

    def _judge(self, batch: Batch, scenario: Scenario) -> list[Failure]:
        """Ask everything that is not excluded, and count it. Of the relations, each of which costs a run, only one."""
        asked = self.invariants - self.known - {i.slug for i in self.relations}
        verdict = verify(scenario, self._run, only=asked | self._relation(scenario))
        planned = list(planned_faults(scenario, verdict.trace))
        self.cases += 1
        batch.tally += Tally(
            cases=1,
            steps=len(verdict.trace.steps),
            planned=len(planned),
            fired=sum(done.fired for _, done in planned),
            reached={slug: reached for slug, (reached, _) in verdict.counts.items()},
            held={slug: held for slug, (_, held) in verdict.counts.items()},
            observed=tuple({f for step in verdict.trace.steps for s in step.substeps for f in s.fields}),
        )
        return _failures(scenario, verdict)

    def _relation(self, scenario: Scenario) -> frozenset[str]:
        """The relation that has been asked least of those that have something to say, if there is one."""
        for relation in sorted(self.relations, key=lambda i: self.relations[i]):
            if relation.slug not in self.known and relation.twin(scenario) is not None:
                self.relations[relation] += 1
                return frozenset((relation.slug,))
        return frozenset()

    def _fail(self, batch: Batch, failure: Failure, scenario: Scenario) -> None:
        """Let the case fail, unless the failure is known or another than the one that is being shrunk."""
        if failure.key in self.known:
            return
        if batch.target is None:
            batch.target = failure
            if self.unit.max_seconds is not None:
                batch.shrink_until = time.monotonic() + SHRINK_SECONDS
        if failure.key == batch.target.key:
            if batch.best is None or _size(scenario) < _size(batch.best):
                batch.target, batch.best = failure, scenario
            raise _departure(failure.key)

    def _results(self, batch: Batch) -> Iterator[Event]:
        """What the batch found, checked once more: a failure that does not repeat is the suite's error."""
        target, scenario = batch.target, batch.best
        if target is None:
            return
        self.known.add(target.key)
        if target.harness or scenario is None:
            yield self._error(target.key, target.message, scenario)
            return
        verdict = verify(scenario, self._run, only=self.invariants)
        again = [v for v in verdict.violations if v.invariant == target.key]
        if not again:
            unsteady = f"{target.key} failed and then held in the same scenario"
            yield self._error(unsteady, unsteady, scenario)
            return
        also = sorted({v.invariant for v in verdict.violations} - self.known)
        self.known.update(also)
        finding = Finding(
            invariant=target.key,
            engine=self.unit.engine,
            device=self.unit.device,
            scenario=scenario,
            violation=again[0],
            bug=self.unit.bug,
            raised_at=raised_at(verdict.trace),
        )
        yield FindingFound(finding=finding, cases=self.cases, also=tuple(also))

    def _error(self, key: str, message: str, scenario: Scenario | None) -> HarnessError:
        return HarnessError(worker=self.unit.worker, bug=self.unit.bug, key=key, message=message, scenario=scenario)


def _failures(scenario: Scenario, verdict: Verdict) -> list[Failure]:
    """Failures of a case. The violations of an unsound run count for nothing."""
    unsound = audit(scenario, verdict.trace)
    if unsound is not None:
        return [unsound]
    return [Failure(slug) for slug in dict.fromkeys(v.invariant for v in verdict.violations)]


@cache
def _departure(key: str) -> type[Departure]:
    return type(key, (Departure,), {})


def _size(scenario: Scenario) -> tuple[int, int, int, str]:
    """Order of scenarios by how much there is to read in them."""
    text = dumps(scenario)
    return len(scenario.steps), sum(len(s.rows) for s in scenario.steps), len(text), text
