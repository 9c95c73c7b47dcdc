"""One scenario, run: the engine's trace laid beside the oracle's and beside what the scenario asked for.

This is the language that invariants are written in. A ``Case`` has steps; a step has rows (what was asked) and
moments (what was seen); moments of one model forward make a ``Run``. A field that was not observed is absent
from its moment, and what would need it is then not reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from scenarios import (
    Config,
    Context,
    Generation,
    Peer,
    Phase,
    RowPlan,
    Scenario,
    Schedule,
    Step,
    StepTrace,
    Trace,
    WorkerTraits,
    batches,
)
from scenarios.trace import ENTERED, FAILED, PREPARED, RESTORED, SAVED, UNREADABLE, UPDATED, VERIFIED

_NOTHING: Mapping[str, Any] = {}


class Moment:
    """One sub-step: what the engine showed (``seen``) and what the oracle says (``said``), by field name."""

    __slots__ = ("name", "order", "phase", "run", "said", "seen", "step")

    def __init__(
        self, step: int, order: int, name: str, run: int, phase: str, seen: Mapping[str, Any], said: Mapping[str, Any]
    ) -> None:
        self.step = step
        self.order = order
        """Position within the step."""
        self.name = name
        self.run = run
        self.phase = phase
        self.seen = seen
        self.said = said


class Run:
    """One model forward of a step, as far as it was observed. ``drafts`` maps i to ``draft[i]``."""

    __slots__ = ("drafts", "entered", "phase", "restored", "saved", "verified")

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.entered: Moment | None = None
        self.verified: Moment | None = None
        self.saved: Moment | None = None
        self.drafts: dict[int, Moment] = {}
        self.restored: Moment | None = None

    @property
    def begun(self) -> bool:
        """Whether the worker is known to have done anything."""
        return bool(self.verified or self.saved or self.drafts or self.restored)

    @property
    def accepted(self) -> list[int] | None:
        """Accepted tokens per row, the target's own included: from ``verified``, in a replay from the outputs."""
        if self.verified is not None and "num_accepted_tokens" in self.verified.seen:
            counts: list[int] = self.verified.seen["num_accepted_tokens"]
            return counts
        return self.restored.seen.get("new_tokens_lens") if self.restored is not None else None


class Row:
    """One row of a batch: the lengths that the schedule derives, and the request's row before it.

    request, past, host_past, query, accepted, granted, wasted  as in ``RowPlan``
    agree     as in the scenario
    sampled   what it accepts in a forward that warms up a graph, where acceptance is not forced
    before    the row of its request in an earlier step, None for its first one and for a dummy
    """

    __slots__ = (
        *("accepted", "agree", "before", "granted", "host_past", "index", "is_context", "past", "query", "request"),
        *("sampled", "step", "wasted"),
    )

    def __init__(
        self, step: StepCase, index: int, plan: RowPlan, asked: Context | Generation, before: Row | None
    ) -> None:
        self.step = step
        self.index = index
        self.request = plan.request
        self.is_context = plan.is_context
        self.past = plan.past
        self.host_past = plan.host_past
        self.query = plan.query
        self.accepted = plan.accepted
        self.granted = plan.granted
        self.agree = asked.agree
        self.sampled = asked.accept if isinstance(asked, Generation) else plan.accepted
        self.before = before
        self.wasted = plan.wasted

    @property
    def flying(self) -> Row | None:
        """Its request's row in the step that runs while this one is prepared, None if there is none."""
        before = self.before
        return before if before is not None and before.step is self.step.flying else None

    @property
    def most(self) -> int:
        """Tokens that it accepts at most: the drafts that it verifies and the target's own."""
        return 1 if self.is_context else min(self.query, self.step.draft_len + 1)

    @property
    def overridden(self) -> bool:
        """Whether drafts of a suffix automaton take the place of its model's."""
        asked, step = self.step.asked.rows[self.index], self.step
        return isinstance(asked, Generation) and step.draft_len > 0 and asked.match >= step.config.sa_threshold > 0


class StepCase:
    """One step: the request (``asked``), its rows, and the moments that were observed.

    active    real requests that own cache pages once the step is over, those that it finishes included
    before    the step before it
    after     the step after it
    captured  the step that captured the graph which this one replays
    """

    def __init__(self, case: Case, index: int, asked: Step, actual: StepTrace, expected: StepTrace) -> None:
        self.case = case
        self.config = case.config
        self.traits = case.traits
        self.index = index
        self.asked = asked
        self.actual = actual
        self.expected = expected
        self.before: StepCase | None = case.steps[-1] if case.steps else None
        self.after: StepCase | None = None
        self.captured: StepCase | None = None
        self.rows: list[Row] = []
        self.active: list[int] = []
        self.prepared: Moment | None = None
        self.updated: Moment | None = None
        self.failed: Moment | None = None
        self.runs: list[Run] = []
        self.moments = self._moments()

    def _moments(self) -> list[Moment]:
        said = {s.key: s.fields for s in self.expected.substeps}
        moments = []
        runs: dict[int, Run] = {}
        for order, substep in enumerate(self.actual.substeps):
            name, number = substep.name, substep.run
            moment = Moment(
                self.index, order, name, number, substep.phase, substep.fields, said.get(substep.key, _NOTHING)
            )
            moments.append(moment)
            if name == PREPARED:
                self.prepared = moment
            elif name == UPDATED:
                self.updated = moment
            elif name == FAILED:
                self.failed = moment
            elif name != UNREADABLE:
                run = runs.get(number)
                if run is None:
                    run = runs[number] = Run(substep.phase)
                _place(run, name, moment)
        self.runs = list(runs.values())
        return moments

    @property
    def forwards(self) -> Iterator[Moment]:
        """Moments at which a forward is about to read the metadata: ``prepared``, ``entered`` and each draft call."""
        if self.prepared is not None:
            yield self.prepared
        for run in self.runs:
            if run.entered is not None:
                yield run.entered
            yield from run.drafts.values()

    @property
    def returned(self) -> Moment | None:
        """``restored`` of its last forward, whose outputs are those of the step; None if it was not observed."""
        return self.runs[-1].restored if self.runs else None

    @property
    def before_with_rows(self) -> StepCase | None:
        """The last step before it that launched anything: not an iteration that only waits."""
        before = self.before
        while before is not None and not before.rows:
            before = before.before
        return before

    @property
    def draft_len(self) -> int:
        """Runtime draft length K."""
        return self.asked.draft_len

    @property
    def num_contexts(self) -> int:
        """Context rows asked for."""
        return len(self.asked.contexts)

    @property
    def has_dummies(self) -> bool:
        """Whether any row is a dummy, which a worker that keeps something of each request drafts for as it likes."""
        return any(row.request is None for row in self.rows)

    @property
    def ranks(self) -> tuple[Peer, ...]:
        """The batch of each rank as it runs, in rank order; a context counts with what it computes."""
        ranks, mine = batches(self.config, self.asked), self.config.attention_dp_rank
        if self.asked.phase.is_startup:
            return ranks
        own = replace(ranks[mine], contexts=tuple(row.query for row in self.rows if row.is_context))
        return (*ranks[:mine], own, *ranks[mine + 1 :])

    @property
    def width(self) -> int:
        """Draft slots of a generation row, at most where each says how many drafts it verifies."""
        return self.config.tokens_per_gen_step(self.asked.draft_len) - 1

    def reads_own_context(self, moment: Moment) -> bool:
        """Whether a draft model is about to run that asks neither the KV cache nor the metadata how far it reaches."""
        return self.traits.keeps_context and moment.name.startswith("draft[")

    @property
    def overlaps(self) -> bool:
        """Whether the next step is launched before the managers are updated for this one."""
        return self.config.overlap and not self.asked.phase.is_startup

    @property
    def flying(self) -> StepCase | None:
        """The step that runs while this one is prepared, None if there is none."""
        before = self.before
        return before if before is not None and before.overlaps and before.actual.outcome == "ok" else None

    @property
    def launched(self) -> StepCase:
        """The last step for whose rows pages are granted when the managers are updated for this one."""
        return self.after if self.after is not None and self.overlaps and self.actual.outcome == "ok" else self

    @property
    def held(self) -> list[int]:
        """Real requests that own cache pages then: the active ones, and those that a step launched since brings in."""
        late = (
            {row.request for row in self.launched.rows if row.request is not None} if self.launched is not self else ()
        )
        return [*self.active, *sorted(set(late) - {*self.active})]

    @property
    def settled(self) -> StepCase | None:
        """The last step whose managers had been updated when this one was prepared, None if that was not observed."""
        step = self.before
        while step is not None and (step.launched.index >= self.index or not step.rows):
            step = step.before
        return step if step is not None and step.ledger is not None else None

    @property
    def ledger(self) -> Moment | None:
        """The moment at which the KV-cache manager was observed: ``updated``, or ``failed`` when it was handled."""
        return self.failed if self.failed is not None and self.actual.outcome == "tolerated" else self.updated


def _place(run: Run, name: str, moment: Moment) -> None:
    if name == ENTERED:
        run.entered = moment
    elif name == VERIFIED:
        run.verified = moment
    elif name == SAVED:
        run.saved = moment
    elif name == RESTORED:
        run.restored = moment
    else:
        run.drafts[int(name.removeprefix("draft[")[:-1])] = moment


class Case:
    """A scenario with the engine's trace of it and the oracle's.

    ``steps`` ends with the first step whose outcome differs from the oracle's: a run that left its plan has
    nothing to compare after that.
    """

    def __init__(self, scenario: Scenario, trace: Trace, expected: Trace) -> None:
        self.scenario = scenario
        self.config: Config = scenario.config
        self.traits: WorkerTraits = scenario.config.traits
        self.trace = trace
        self.expected = expected
        self.requests = {r.id: r for r in scenario.requests}
        self.steps: list[StepCase] = []
        self._last: dict[int, Row] = {}
        self._graphs: dict[tuple[int, int, int], StepCase] = {}
        schedule = Schedule(scenario.config, scenario.requests)
        for asked, actual, wanted in zip(scenario.steps, trace.steps, expected.steps, strict=False):
            step = StepCase(self, len(self.steps), asked, actual, wanted)
            if step.before is not None:
                step.before.after = step
            self._fill_rows(step, schedule.advance(asked))
            self._link_graph(step)
            self.steps.append(step)
            if actual.outcome != wanted.outcome:
                break

    def _link_graph(self, step: StepCase) -> None:
        key = len(step.rows), step.draft_len, sum(row.query for row in step.rows)
        if step.asked.phase is Phase.CAPTURE:
            self._graphs[key] = step
        elif step.asked.phase is Phase.REPLAY:
            step.captured = self._graphs[key]

    def _fill_rows(self, step: StepCase, plans: list[RowPlan]) -> None:
        last = self._last
        for index, (asked, plan) in enumerate(zip(step.asked.rows, plans, strict=True)):
            before = last.get(plan.request) if plan.request is not None else None
            row = Row(step, index, plan, asked, before)
            step.rows.append(row)
            if plan.request is not None and not plan.wasted:
                last[plan.request] = row
        if step.before is not None:
            for request in step.before.asked.finish:
                # A failure that nobody planned has ended it already.
                last.pop(request, None)
        if step.actual.outcome != "ok":
            last.clear()
        step.active = list(last)
