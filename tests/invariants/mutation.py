"""How a test falsifies a trace, one place at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scenarios import Scenario, Trace
from tests.invariants.synthetic import edit, edit_step


@dataclass(frozen=True)
class Mutation:
    """A scenario, how its trace is falsified, and where the invariant must point."""

    slug: str
    scenario: Scenario
    falsify: Callable[[Trace], Trace]
    step: int
    substep: str | None = None
    field: str | None = None
    run: int = 0

    def __str__(self) -> str:
        return f"{self.slug}-{self.scenario.config.worker}-{self.step}-{self.substep}-{self.field}"


def at(
    slug: str, scenario: Scenario, step: int, substep: str, field: str, change: Callable[[Any], Any], run: int = 0
) -> Mutation:
    """The mutation of one field, which the invariant must name."""
    return Mutation(
        slug, scenario, lambda trace: edit(trace, step, substep, field, change, run), step, substep, field, run
    )


def set_to(slug: str, scenario: Scenario, step: int, substep: str, field: str, value: Any, run: int = 0) -> Mutation:
    return at(slug, scenario, step, substep, field, lambda _: value, run)


def whole(slug: str, scenario: Scenario, step: int, **changes: Any) -> Mutation:
    """The mutation of a step as a whole."""
    return Mutation(slug, scenario, lambda trace: edit_step(trace, step, **changes), step)


def bump(index: int, by: int = 1) -> Callable[[Any], Any]:
    """One entry off by a little."""

    def change(values: Any) -> Any:
        values[index] += by
        return values

    return change


def swap(values: Any) -> Any:
    """The first two rows exchanged."""
    return [values[1], values[0], *values[2:]]


def drop(values: Any) -> Any:
    """The last row left out."""
    return values[:-1]


def put(key: Any, value: Any) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        values[key] = value
        return values

    return change
