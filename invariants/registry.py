"""What an invariant is, and the register of all of them.

An invariant is a named statement about traces. Three kinds differ in what they hold a run against:

PREDICATE   the run's own trace: no oracle is needed, the statement is about the engine's own numbers
REFERENCE   the oracle's trace of the same scenario
RELATION    a second run of the same engine: a *twin* scenario that must end up alike

Modules are imported causes first, so the order of registration is the order of severity: of two invariants that
are violated at the same sub-step, the one registered earlier is closer to the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from invariants.predicates import PREDICATES
from scenarios import Scenario, UsageError, closest

if TYPE_CHECKING:
    from invariants.case import StepCase
    from invariants.check import Check

PREDICATE: Final = "predicate"
REFERENCE: Final = "reference"
RELATION: Final = "relation"


@dataclass(frozen=True)
class Invariant:
    """A named statement about traces.

    slug       stable name, for command lines and findings
    statement  one sentence
    reads      fields of ``scenarios.FIELDS`` that it looks at; one that no trace holds leaves it unreached
    museum     entries of the bug museum that it would have caught
    kind       ``PREDICATE``, ``REFERENCE`` or ``RELATION``
    trait      flag of ``WorkerTraits`` without which a worker never reaches it, "" if there is none
    predicates which of ``PREDICATES`` it holds; none for a statement about the run, not about the engine's state
    """

    slug: str
    statement: str
    reads: tuple[str, ...]
    museum: tuple[str, ...]
    kind: str
    trait: str
    predicates: tuple[str, ...]


@dataclass(frozen=True)
class Predicate(Invariant):
    """An invariant over one run, asked of every step in turn."""

    ask: Callable[[StepCase, Check], None]


@dataclass(frozen=True)
class Twin:
    """A second scenario, and which of its steps must look like which of the first.

    pairs   (step of the first scenario, step of the twin)
    fields  what is compared in sub-steps that both have; None stands for all fields but ``ignore``
    known   compare only requests that the twin knows, in fields that are kept per request
    skip    sub-steps that are not compared
    prefix  of each list that is kept per request, compare as much as both have
    """

    scenario: Scenario
    pairs: tuple[tuple[int, int], ...]
    fields: tuple[str, ...] | None = None
    ignore: frozenset[str] = frozenset()
    known: bool = False
    skip: frozenset[str] = frozenset()
    prefix: bool = False


@dataclass(frozen=True)
class Relation(Invariant):
    """An invariant over two runs. ``twin`` gives None for a scenario that it has nothing to say about."""

    twin: Callable[[Scenario], Twin | None]


_REGISTER: dict[str, Invariant] = {}
LISTED: Final = "`specfuzz list invariants`"
"""Where a person finds them all."""


def _statement(function: Callable[..., object]) -> str:
    """First paragraph of the docstring, on one line."""
    return " ".join((function.__doc__ or "").split("\n\n")[0].split())


def _register(invariant: Invariant) -> None:
    if invariant.slug in _REGISTER:
        raise ValueError(f"invariants: {invariant.slug} is registered twice; give each its own slug")
    if not invariant.statement:
        raise ValueError(f"invariants: {invariant.slug} states nothing; give its function a docstring")
    for predicate in invariant.predicates:
        if predicate not in PREDICATES:
            raise ValueError(f"invariants: {invariant.slug} holds {predicate!r}; write one of {', '.join(PREDICATES)}")
    _REGISTER[invariant.slug] = invariant


Ask = Callable[["StepCase", "Check"], None]
MakeTwin = Callable[[Scenario], "Twin | None"]


def invariant(
    slug: str,
    *,
    reads: Iterable[str],
    museum: Iterable[str] = (),
    kind: str = PREDICATE,
    trait: str = "",
    predicates: Iterable[str] = (),
) -> Callable[[Ask], Ask]:
    """Register the decorated function; the first paragraph of its docstring is the statement.

    The function is called with each step and makes its comparisons through the ``Check``.
    """

    def register(ask: Ask) -> Ask:
        _register(Predicate(slug, _statement(ask), tuple(reads), tuple(museum), kind, trait, tuple(predicates), ask))
        return ask

    return register


def relation(
    slug: str, *, reads: Iterable[str], museum: Iterable[str] = (), trait: str = "", predicates: Iterable[str] = ()
) -> Callable[[MakeTwin], MakeTwin]:
    """Register the decorated function, which makes the twin of a scenario."""

    def register(twin: MakeTwin) -> MakeTwin:
        _register(
            Relation(slug, _statement(twin), tuple(reads), tuple(museum), RELATION, trait, tuple(predicates), twin)
        )
        return twin

    return register


def all_invariants() -> list[Invariant]:
    """Every registered invariant, most severe first."""
    return list(_REGISTER.values())


def find(slug: str) -> Invariant:
    """The invariant of that slug; ``UsageError`` with the closest one if there is none."""
    if slug not in _REGISTER:
        raise UsageError(f"invariant: none is called {slug!r}; {closest(slug, _REGISTER, listed=LISTED)}")
    return _REGISTER[slug]
