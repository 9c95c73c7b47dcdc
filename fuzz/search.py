"""The search: Hypothesis drives one unit of work, batch by batch.

A batch is one Hypothesis run, which ends with its first failure. That is shrunk with only the one invariant asked,
so that shrinking neither slips to another violation nor pays for the rest. Afterwards the invariant is excluded, with
all others that the shrunk scenario violates too, and the search goes on with the next batch until the budget is spent.

Every Hypothesis setting is explicit, as its profiles differ between a terminal and CI.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Final, NoReturn

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, Unsatisfiable

from engines.base import Engine, run
from fuzz import interrupt, reach
from fuzz.audit import (
    FAULT_SURFACES,
    PROCESS_SURVIVES,
    SUITE_ERRORS,
    Failure,
    ProcessEnded,
    audit,
    crash,
    planned_faults,
    raised_at,
    surviving,
)
from fuzz.draws import each_anew, from_the_seed_alone
from fuzz.events import BatchFinished, Event, Events, FindingFound, HarnessError, Tally
from fuzz.journal import Case, Journal
from fuzz.shrink import shrink
from fuzz.small import small_scenario
from fuzz.unit import Unit
from invariants import Relation, Verdict, all_invariants, verify
from scenarios import Finding, Scenario, Trace, UsageError, Violation
from strategies import configs, faulted_scenarios, scenarios
from strategies.plain import plain_scenario

BATCH: Final = 100
"""Most cases of a batch: how often a campaign hears of its progress."""
OPENING: Final = 16
"""Cases of the first batch, where steps may fail: short ones, which show in a fraction of the time what they can."""
SHRINK_RUNS: Final = 500
"""Most runs made to shrink one failure."""
SHRINK_SECONDS: Final = 10.0
"""Most seconds spent on it, where the unit has a time limit."""
EMPTY_BATCHES: Final = 3
"""Batches in a row without a case after which the search gives up."""
MOST_REFUSALS: Final = 50
"""Cases, the first of all, that an engine may refuse in a row: one that drives any configuration runs some of them."""
MAX_DRAFT_LEN: Final = 7
"""Largest Kmax where none is asked for."""
MAX_STEPS: Final = 10
"""Most steps of a scenario without a fault: captures, a prompt and replays of their graphs need half a dozen."""


class EndOfBatch(BaseException):
    """Ends a Hypothesis run at once: no ``Exception``, so that Hypothesis does not take it for a failing case."""


@dataclass
class Batch:
    """What one Hypothesis run has done, and the failure that ended it, if one did."""

    tally: Tally = field(default_factory=Tally)
    failure: Failure | None = None
    scenario: Scenario | None = None


class Search:
    """Searches one unit on an engine. ``journal`` is told each scenario before the engine is given it."""

    def __init__(self, unit: Unit, engine: Engine, journal: Journal | None = None) -> None:
        self.unit = unit
        self.engine = engine
        self.journal = journal
        self.known = set(unit.exclude)
        self.cases = 0
        self.refusals: Counter[str] = Counter()
        """Why the engine would not run some cases."""
        asked = [i for i in all_invariants() if not unit.invariants or i.slug in (*unit.invariants, FAULT_SURFACES)]
        self.invariants = frozenset(i.slug for i in asked)
        self.relations = {i: 0 for i in asked if isinstance(i, Relation)}
        """Relations, and how often each was asked."""
        self.deadline = float("inf") if unit.max_seconds is None else time.monotonic() + unit.max_seconds

    def events(self) -> Events:
        """Search until the budget is spent, or something is found where the unit asks for the first only."""
        number = empty = 0
        while self.cases < self.unit.max_cases and empty < EMPTY_BATCHES and not self._refuses_all:
            if number and time.monotonic() >= self.deadline:
                break
            started = time.monotonic()
            batch = self._hunt(number)
            # Noted until whoever listens has stored what became of it.
            with nullcontext() if batch.scenario is None else self._noted(batch.scenario):
                results = list(self._results(batch))
                seconds = Tally(seconds=time.monotonic() - started)
                yield BatchFinished(worker=self.unit.worker, bug=self.unit.bug, tally=batch.tally + seconds)
                yield from results
            if self.unit.first and any(isinstance(r, FindingFound) for r in results):
                return
            number += 1
            empty = 0 if batch.tally.cases else empty + 1
        if self.refusals and not self.cases:
            ((reason, _),) = self.refusals.most_common(1)
            yield self._error(reason, reason, None)

    def _hunt(self, number: int) -> Batch:
        """One Hypothesis run."""
        batch = Batch()
        opening = number == 0 and bool(self.unit.faults) and not self.unit.plain

        # Of its own for each worker: with one seed for all, a campaign would draw the same shapes ten times over.
        @seed(f"{self.unit.worker} {self.unit.seed} {number}")
        @settings(
            max_examples=min(OPENING if opening else BATCH, self.unit.max_cases - self.cases),
            database=None,
            deadline=None,
            derandomize=False,
            phases=(Phase.generate,),
            print_blob=False,
            report_multiple_bugs=False,
            stateful_step_count=1,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            backend="hypothesis",
        )
        @given(self._cases(batch, opening))
        def case(scenario: Scenario) -> None:
            self._case(batch, scenario)

        try:
            with from_the_seed_alone(), each_anew():
                case()
        except (EndOfBatch, Unsatisfiable):
            pass
        except HypothesisException as error:
            # The strategies are at fault, for instance with draws that differ from run to run.
            with suppress(EndOfBatch):
                self._fail(batch, crash(error), None)
        return batch

    def _cases(self, batch: Batch, opening: bool) -> st.SearchStrategy[Scenario]:
        """Scenarios, clean or with a fault; for an ``opening`` the shortest in which a step fails."""
        unit = self.unit
        most = MAX_DRAFT_LEN if unit.max_draft_len is None else unit.max_draft_len
        if unit.plain:
            return self._plain_cases(batch, most)
        config = configs(
            workers=(unit.worker,),
            backends=self.engine.backends,
            variants=getattr(self.engine, "variants", ()),
            max_draft_len=most,
            plain_caches=getattr(self.engine, "plain_caches", False),
        )

        def record(scenario: Scenario) -> Mapping[str, int]:
            return self._record(batch, scenario)

        if opening:
            return faulted_scenarios(record=record, config=config, max_steps=2)
        kinds = [scenarios(config=config, max_steps=MAX_STEPS)]
        if unit.faults:
            kinds.append(faulted_scenarios(record=record, config=config))
        return st.one_of(kinds)

    def _plain_cases(self, batch: Batch, max_draft_len: int) -> st.SearchStrategy[Scenario]:
        """Scenarios drawn without aim. A site is one that some small scenario passes, whatever this one does."""
        unit, numbers = self.unit, count()
        steps = run(self.engine, small_scenario(unit.worker), observe=False, record=unit.faults).steps
        sites = sorted({site for step in steps for site in step.sites})

        def make(number: int) -> Scenario:
            """The next scenario of this search, from a number that Hypothesis draws."""
            return plain_scenario(
                Random(f"{number} {next(numbers)}"),
                worker=unit.worker,
                backends=self.engine.backends,
                variants=getattr(self.engine, "variants", ()),
                max_draft_len=max_draft_len,
                max_steps=MAX_STEPS,
                sites=sites,
                record=partial(self._record, batch) if sites else None,
            )

        return st.integers(0, 2**64 - 1).map(make)

    def _record(self, batch: Batch, scenario: Scenario) -> Mapping[str, int]:
        """The fault sites of the last step."""
        try:
            steps = self._run(scenario, observe=False, record=self.unit.faults).steps
        except UsageError as error:
            self._refuse(error)
        except SUITE_ERRORS as error:
            self._fail(batch, crash(error), scenario)
            reject()
        return steps[-1].sites if len(steps) == len(scenario.steps) else {}

    def _run(self, scenario: Scenario, *, observe: bool = True, record: tuple[str, ...] = ()) -> Trace:
        interrupt.check()
        with self._noted(scenario), surviving():
            return run(self.engine, scenario, observe=observe, record=record)

    def _noted(self, scenario: Scenario) -> AbstractContextManager[None]:
        """A block whose scenario is on disk: should the process die in it, it is not lost."""
        unit = self.unit
        return self.journal.case(Case(unit.engine, unit.device, unit.bug, scenario)) if self.journal else nullcontext()

    def _case(self, batch: Batch, scenario: Scenario) -> None:
        interrupt.check()
        # However slow the machine is, nothing executed at all would be no search.
        if self.cases and time.monotonic() >= self.deadline:
            raise EndOfBatch
        try:
            with self._noted(scenario):
                failures = self._judge(batch, scenario)
                if self.journal and any(failure.key not in self.known for failure in failures):
                    self.journal.keep()
        except UsageError as error:
            self._refuse(error)
        except SUITE_ERRORS as error:
            failures = [crash(error)]
        for failure in failures:
            self._fail(batch, failure, scenario)

    def _refuse(self, error: UsageError) -> NoReturn:
        """Pass over a case whose configuration the engine cannot drive."""
        self.refusals[str(error)] += 1
        if self._refuses_all:
            raise EndOfBatch
        reject()

    @property
    def _refuses_all(self) -> bool:
        return not self.cases and self.refusals.total() >= MOST_REFUSALS

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

    def _fail(self, batch: Batch, failure: Failure, scenario: Scenario | None) -> None:
        """End the batch with the failure, unless it is known already."""
        if failure.key not in self.known:
            self.known.add(failure.key)
            batch.failure, batch.scenario = failure, scenario
            raise EndOfBatch

    def _results(self, batch: Batch) -> Iterator[Event]:
        """What the batch found, in the smallest scenario."""
        failure, scenario = batch.failure, batch.scenario
        if failure is None:
            return
        if scenario is None or not self._again(failure, scenario):
            # Nothing that could be run once more, or an engine that does something else each time.
            yield self._error(failure.key, failure.message or _unrepeated(failure), scenario)
            return
        seconds = float("inf") if self.unit.max_seconds is None else SHRINK_SECONDS
        found: dict[Scenario, Failure] = {}

        def fails(candidate: Scenario) -> bool:
            again = self._again(failure, candidate)
            if again is not None:
                found[candidate] = again
            return again is not None

        small = shrink(scenario, fails, runs=SHRINK_RUNS, seconds=seconds)
        if failure.harness:
            yield self._error(failure.key, found.get(small, failure).message, small)
        else:
            yield self._finding(failure, small)

    def _again(self, failure: Failure, scenario: Scenario) -> Failure | None:
        """The same failure in another run, None if it does not occur. Only what it is about is asked."""
        slugs = frozenset((failure.key,))
        only = slugs if slugs <= self.invariants else self.invariants
        try:
            failures = _failures(scenario, verify(scenario, self._run, only=only))
        except SUITE_ERRORS as error:
            failures = [crash(error)]
        return next((again for again in failures if again.key == failure.key), None)

    def _finding(self, failure: Failure, scenario: Scenario) -> FindingFound | HarnessError:
        """The finding in a shrunk scenario, with what else it violates: most likely for the same reason.

        That includes what is known from earlier findings, so that a report can tell which belong together.
        An error where the violation does not repeat, as on an engine that does something else each time.
        """
        try:
            verdict = verify(scenario, self._run, only=self.invariants)
        except ProcessEnded as ended:
            end = Violation(invariant=PROCESS_SURVIVES, step=0, message=str(ended))
            return self._found(end, scenario, ended.raised_at)
        violation = next((v for v in verdict.violations if v.invariant == failure.key), None)
        if violation is None:
            return self._error(failure.key, _unrepeated(failure), scenario)
        also = sorted({v.invariant for v in verdict.violations} - {failure.key})
        self.known.update(also)
        return self._found(violation, scenario, raised_at(verdict.trace), also)

    def _found(
        self, violation: Violation, scenario: Scenario, place: str | None, also: Iterable[str] = ()
    ) -> FindingFound:
        finding = Finding(
            invariant=violation.invariant,
            engine=self.unit.engine,
            device=self.unit.device,
            scenario=scenario,
            violation=violation,
            bug=self.unit.bug,
            raised_at=place,
            seen_on=reach.of_violation(self.unit.engine, self.unit.device, scenario, violation.invariant),
        )
        return FindingFound(finding=finding, cases=self.cases, also=tuple(also))

    def _error(self, key: str, message: str, scenario: Scenario | None) -> HarnessError:
        return HarnessError(worker=self.unit.worker, bug=self.unit.bug, key=key, message=message, scenario=scenario)


def _unrepeated(failure: Failure) -> str:
    return f"{failure.key} failed and then held in the same scenario"


def _failures(scenario: Scenario, verdict: Verdict) -> list[Failure]:
    """Failures of a case. The violations of an unsound run count for nothing."""
    unsound = audit(scenario, verdict.trace)
    if unsound is not None:
        return [unsound]
    return [Failure(slug) for slug in dict.fromkeys(v.invariant for v in verdict.violations)]
