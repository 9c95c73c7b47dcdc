"""What the suite asks of an engine under test: open a session, take steps, yield a trace."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from faults import INJECTORS, LINES, SEAMS, TORCH
from scenarios import Config, Request, Scenario, ScenarioError, Step, StepTrace, Trace

__all__ = ["INJECTORS", "LINES", "SEAMS", "TORCH", "Engine", "Session", "run"]


class Session(Protocol):
    """One engine instance living through a scenario. Not thread-safe."""

    def add(self, request: Request) -> None:
        """Queue a request; it runs when a step names it."""
        ...

    def step(self, step: Step) -> StepTrace:
        """Execute one iteration.

        An exception that the engine's code raises, injected or not, ends up in the returned trace. What is
        raised here is an error of the suite itself.
        """
        ...

    def trace(self) -> Trace:
        """Everything so far."""
        ...

    def close(self) -> None:
        """Take every wrapper off again and release the pools."""
        ...


class Engine(Protocol):
    """A system under test.

    ``name`` is "portable" or "tensorrt_llm"; ``device`` as in ``Trace.device``; ``backends`` are the attention
    backends that it can drive, keys of ``scenarios.BACKENDS``.

    An engine may have two more attributes, which tell searches what to draw. ``variants`` names the fields of
    ``scenarios.acceptance.VARIANTS`` that it supports, none without the attribute. With ``plain_caches`` set it refuses
    separate draft KV caches, ``kv_cache_manager`` other than V1 and ``host_offload``.
    """

    name: str
    device: str
    backends: Collection[str]

    def open(
        self,
        config: Config,
        requests: tuple[Request, ...] = (),
        *,
        observe: bool = True,
        record: Collection[str] = (),
    ) -> Session:
        """Start a session.

        observe  False: no sub-steps are recorded (the bare engine, for benchmarks)
        record   families of ``INJECTORS`` whose sites are counted into ``StepTrace.sites``

        Raises ``UsageError`` for a configuration that this engine cannot drive.
        """
        ...


def run(engine: Engine, scenario: Scenario, *, observe: bool = True, record: Collection[str] = ()) -> Trace:
    """Run a whole scenario; a fatal step ends it early.

    A session that has a method ``foresee`` is told all steps first, which may spare it work. What it says of a step,
    as a ``ScenarioError``, is raised with the step's place.
    """
    session = engine.open(scenario.config, scenario.requests, observe=observe, record=record)
    try:
        if hasattr(session, "foresee"):
            session.foresee(scenario.steps)
        for index, step in enumerate(scenario.steps):
            try:
                outcome = session.step(step).outcome
            except ScenarioError as error:
                place = f"steps[{index}]"
                # A schedule names the step itself; a fault site knows of none.
                raise error if error.field.startswith(place) else error.within(place) from None
            if outcome == "fatal":
                break
        return session.trace()
    finally:
        session.close()
