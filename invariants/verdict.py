"""Asking all invariants about one scenario, and adding up what many scenarios say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import reference
from invariants.case import Case, Moment
from invariants.check import Check
from invariants.registry import Invariant, Predicate, Relation, Twin, all_invariants, find
from scenarios import Scenario, ScenarioError, StepTrace, Trace, UsageError, Violation
from scenarios.trace import FAILED, PREPARED, UPDATED

Counts = Mapping[str, tuple[int, int]]
Run = Callable[[Scenario], Trace]

_OF_WHOLE_STEP: Final = frozenset({PREPARED, UPDATED, FAILED})
"""Sub-steps that a step has once, however many forwards it runs."""
_OF_DRAFTER: Final = frozenset(
    {
        *("input_ids", "position_ids", "hidden_states", "num_ctx_per_req", "ctx_len"),
        *("next_draft_tokens", "next_new_tokens", "sa_draft_tokens"),
    }
)
"""Fields that the oracle leaves open where they hang on a dummy's slot, which may hold anything; then twins may differ.
"""


@dataclass(frozen=True)
class Verdict:
    """What the invariants say about one scenario.

    violations  in the order in which a person should read them: by step, sub-step, severity
    counts      slug -> (comparisons reached, comparisons that held), for every invariant that was asked
    trace       the engine's
    expected    the oracle's
    """

    violations: tuple[Violation, ...]
    counts: Counts
    trace: Trace
    expected: Trace

    @property
    def first(self) -> Violation | None:
        """The violation closest to the cause, None if there is none."""
        return self.violations[0] if self.violations else None


@dataclass
class Tally:
    """Counts over many verdicts; add verdicts with ``+=``.

    An invariant that was asked and never reached has said nothing: see ``unreached``.
    """

    cases: int = 0
    steps: int = 0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __iadd__(self, verdict: Verdict) -> Tally:
        self.cases += 1
        self.steps += len(verdict.trace.steps)
        self.merge(verdict.counts)
        return self

    def merge(self, counts: Counts) -> None:
        """Add counts, for instance those of another process."""
        for slug, (reached, held) in counts.items():
            before = self.counts.get(slug, (0, 0))
            self.counts[slug] = before[0] + reached, before[1] + held

    @property
    def unreached(self) -> list[str]:
        """Slugs that were asked and never compared anything."""
        return [slug for slug, (reached, _) in self.counts.items() if not reached]


def verify(
    scenario: Scenario,
    run: Run,
    *,
    only: Collection[str] | None = None,
    relations: bool = True,
    expected: Trace | None = None,
) -> Verdict:
    """Run a valid scenario and ask the invariants about it.

    run        executes a scenario on the engine under test; called once, and once more per relation that applies. One
               whose twin it refuses (``UsageError``), as upstream's version of a worker may, says nothing
    only       slugs to ask; None asks all. ``UsageError`` for one that does not exist
    relations  False leaves out those that need further runs
    expected   the oracle's trace, when the caller has it already
    """
    chosen = None if only is None else {find(slug).slug for slug in only}
    asked = [i for i in all_invariants() if chosen is None or i.slug in chosen]
    trace = run(scenario)
    if not trace.steps:
        raise UsageError(f"trace: engine {trace.engine!r} ran no step of the scenario, so there is nothing to check")
    case = Case(scenario, trace, reference.trace(scenario) if expected is None else expected)
    checks = [Check(i) for i in asked if relations or not isinstance(i, Relation)]
    for check in checks:
        _ask(check.invariant, case, check, run)
    found = [
        (step, order, severity, violation)
        for severity, check in enumerate(checks)
        for step, order, violation in check.found
    ]
    found.sort(key=lambda entry: entry[:3])
    counts = {check.invariant.slug: (check.reached, check.held) for check in checks}
    return Verdict(tuple(entry[3] for entry in found), counts, trace, case.expected)


def _ask(invariant: Invariant, case: Case, check: Check, run: Run) -> None:
    if isinstance(invariant, Predicate):
        for step in case.steps:
            invariant.ask(step, check)
    else:
        assert isinstance(invariant, Relation)
        twin = invariant.twin(case.scenario)
        if twin is None:
            return
        try:
            other = run(twin.scenario)
        except ScenarioError:
            # The twin itself is wrong.
            raise
        except UsageError:
            return
        _compare(case, twin, other, check)


def _compare(case: Case, twin: Twin, other: Trace, check: Check) -> None:
    """Compare the paired steps of two runs, as far as the first one went."""
    for index, place in twin.pairs:
        if index >= len(case.steps):
            return
        step = case.steps[index]
        theirs = other.steps[place] if place < len(other.steps) else None
        mine, outcome = step.actual.outcome, theirs.outcome if theirs is not None else "never run"
        told = "" if mine == outcome else f"the step ended {_ending(step.actual)}, in the twin {_twin(other, theirs)}"
        check.run(mine == outcome, index, None, outcome, mine, told)
        fields = {s.key: s.fields for s in theirs.substeps} if theirs is not None else {}
        runs = max((run for _, run in fields), default=0)
        for moment in step.moments:
            if moment.name in twin.skip:
                continue
            run = moment.run
            if moment.name not in _OF_WHOLE_STEP:
                # Forwards before the last one, that is before a capture, are all alike; the twin may have none.
                run = runs if run == len(step.runs) - 1 else min(run, runs - 1)
            _compare_fields(moment, fields.get((moment.name, run), {}), twin, check)


def _twin(trace: Trace, step: StepTrace | None) -> str:
    """How a step of a twin ended, for a person; None for one before which the twin had ended."""
    if step is not None:
        return _ending(step)
    last = trace.steps[-1] if trace.steps else None
    return "never run" if last is None or last.outcome == "ok" else f"never run, as its last one ended {_ending(last)}"


def _ending(step: StepTrace) -> str:
    """How a step ended, for a person: with the exception and its place, where there was one."""
    failed = step.find(FAILED)
    if failed is None:
        return step.outcome
    exception, message, place = (failed.fields.get(name) for name in ("exception", "message", "raised_at"))
    return f"{step.outcome} ({exception} at {place or 'an unknown place'}: {message})"


def _compare_fields(moment: Moment, theirs: Mapping[str, Any], twin: Twin, check: Check) -> None:
    for name in theirs if twin.fields is None else twin.fields:
        if name in _OF_DRAFTER and name not in moment.said:
            continue
        if name in theirs and name in moment.seen and name not in twin.ignore:
            expected, actual = theirs[name], moment.seen[name]
            if twin.known:
                actual = _known(actual, expected)
            if twin.prefix:
                expected, actual = _as_far_as_both(expected, actual)
            check.agree(moment, name, expected, actual, f"the twin's {name}")


def _known(actual: Any, expected: Any) -> Any:
    """What is kept for requests that the twin has, too; some of it is kept apart for each kind of cache."""
    if not (isinstance(actual, dict) and isinstance(expected, dict)):
        return actual
    return {key: _known(value, expected[key]) for key, value in actual.items() if key in expected}


def _as_far_as_both(expected: Any, actual: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Of what is kept for requests that both know, as much as both have."""
    lens = {request: min(len(actual[request]), len(expected[request])) for request in actual if request in expected}
    return {i: expected[i][:n] for i, n in lens.items()}, {i: actual[i][:n] for i, n in lens.items()}
