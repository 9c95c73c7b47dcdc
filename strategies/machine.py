"""A state machine that drives an engine and the oracle side by side, one step of the executor per rule."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scenarios import Config, FaultKind, Phase, Request, Scenario, Step, StepTrace
from strategies.choices import choose, in_range
from strategies.composer import Composer, Record
from strategies.config import DENSE
from strategies.fault import Kinds
from strategies.phase import phase_table
from strategies.scenario import config_source

_TOLERATED: Final[Kinds] = {
    Phase.WARMUP: (FaultKind.OOM,),
    Phase.EAGER: (FaultKind.ERROR, FaultKind.OOM),
    Phase.REPLAY: (FaultKind.ERROR, FaultKind.OOM),
}


class Session(Protocol):
    """What takes steps: a session of an engine, or of the oracle."""

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self, step: Step) -> StepTrace:
        """Execute one iteration."""
        ...


class ClosingSession(Session, Protocol):
    """A session that holds wrappers or memory."""

    def close(self) -> None:
        """Let go of them."""
        ...


@dataclass(frozen=True)
class Subject:
    """What a machine drives, and how it judges; see ``make_machine``."""

    open_session: Callable[[Config], ClosingSession]
    open_reference: Callable[[Config], Session]
    check_step: Callable[[Scenario, StepTrace, StepTrace], None]
    record: Record | None
    configs: st.SearchStrategy[Config]
    max_startup: int


def make_machine(
    *,
    open_session: Callable[[Config], ClosingSession],
    open_reference: Callable[[Config], Session],
    check_step: Callable[[Scenario, StepTrace, StepTrace], None],
    record: Record | None = None,
    config: Config | st.SearchStrategy[Config] | None = None,
    workers: Collection[str] | None = None,
    backends: Collection[str] = DENSE,
    variants: Collection[str] = (),
    max_draft_len: int = 7,
    max_batch: int = 8,
    max_startup: int = 3,
) -> type[ScenarioMachine]:
    """A state machine that takes the same steps with an engine and with the oracle.

        TestPortable = make_machine(
            open_session=PortableEngine().open, open_reference=reference.Session, check_step=compare
        ).TestCase

    open_session    opens a session of the engine; it is closed at the end
    open_reference  opens a session of the oracle
    check_step      is given the scenario so far and what the engine and the oracle say of its last step; it raises
                    where they differ, as the machine goes on as the oracle does
    record          as in ``faulted_scenarios``; without it no step fails. Only tolerated faults are drawn
    max_startup     most steps of start-up

    The other options are those of ``scenarios``. Raises ``UsageError`` for an argument that is out of range.
    """
    in_range("make_machine", "max_startup", max_startup, 0)
    source = config_source("make_machine", config, workers, backends, variants, max_draft_len, max_batch)
    subject = Subject(open_session, open_reference, check_step, record, source, max_startup)
    return type("ScenarioMachine", (ScenarioMachine,), {"subject": subject})


@st.composite
def _runner_configs(draw: st.DrawFn) -> Config:
    machine: ScenarioMachine = draw(st.runner())
    return draw(machine.subject.configs)


@st.composite
def _steps(draw: st.DrawFn, phase: Phase) -> Step:
    """The next step of the machine that runs: what is possible depends on what has happened."""
    composer: Composer = draw(st.runner()).composer
    composer.draw_step(draw, phase)
    return composer.steps[-1]


@st.composite
def _failing_steps(draw: st.DrawFn) -> Step:
    machine: ScenarioMachine = draw(st.runner())
    assert machine.subject.record is not None
    phase = choose(draw, [p for p in machine.phases if p in _TOLERATED])
    machine.composer.draw_failure(draw, machine.subject.record, phase=phase, kinds=_TOLERATED, last=False)
    return machine.composer.steps[-1]


def _may(phase: Phase) -> Callable[[Any], bool]:
    return lambda machine: phase in machine.phases


class ScenarioMachine(RuleBasedStateMachine):
    """Takes one step after another, far beyond the length of a scenario. ``make_machine`` says what it drives."""

    subject: ClassVar[Subject]

    @property
    def scenario(self) -> Scenario:
        """The run so far, as a value to be reported or replayed."""
        return self.composer.scenario()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that the next step may have."""
        startup = len(self.composer.steps) < self.subject.max_startup
        return phase_table(self.composer.schedule, with_startup=startup)

    @initialize(config=_runner_configs())
    def open(self, config: Config) -> None:
        """Start both sides."""
        self.composer = Composer(config, startup=0)
        self.entered = 0
        self.reference = self.subject.open_reference(config)
        self.session = self.subject.open_session(config)

    def teardown(self) -> None:
        """Close the session of the engine, if it came to be opened."""
        if hasattr(self, "session"):
            self.session.close()

    @precondition(_may(Phase.WARMUP))
    @rule(step=_steps(Phase.WARMUP))
    def warm_up(self, step: Step) -> None:
        """General warm-up."""
        self.take(step)

    @precondition(_may(Phase.CAPTURE))
    @rule(step=_steps(Phase.CAPTURE))
    def capture(self, step: Step) -> None:
        """Capture of a graph."""
        self.take(step)

    @rule(step=_steps(Phase.EAGER))
    def serve(self, step: Step) -> None:
        """A served batch."""
        self.take(step)

    @precondition(_may(Phase.REPLAY))
    @rule(step=_steps(Phase.REPLAY))
    def replay(self, step: Step) -> None:
        """A served batch by replaying a graph."""
        self.take(step)

    @precondition(lambda self: self.subject.record and self._within_budget)
    @rule(step=_failing_steps())
    def fail(self, step: Step) -> None:
        """A step with a fault."""
        self.take(step)

    @property
    def _within_budget(self) -> bool:
        return self.composer.schedule.failures < self.composer.schedule.config.error_budget

    def take(self, step: Step) -> None:
        """Let both sides take a step, and compare."""
        arrived = self.composer.requests[self.entered :]
        self.entered += len(arrived)
        for request in arrived:
            self.session.add(request)
            self.reference.add(request)
        actual, expected = self.session.step(step), self.reference.step(step)
        self.subject.check_step(self.scenario, actual, expected)
