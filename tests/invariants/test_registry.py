"""The register: what may be in it and what a reader finds there."""

from __future__ import annotations

import re

import pytest

from invariants import PREDICATES, Predicate, Relation, all_invariants, find, invariant, relation
from invariants.registry import PREDICATE, REFERENCE, RELATION
from scenarios import FIELDS, UsageError

OF_THE_RUN = {"steps-complete", "run-complete", "fault-surfaces", "state-can-be-read"}
"""What they say is that a run went as planned, of which the predicates say nothing."""


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("item", all_invariants(), ids=lambda i: i.slug)
def test_each_is_well_described(item: Predicate | Relation) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", item.slug)
    assert item.statement[0].isupper() or item.statement.startswith("``")
    assert item.statement.endswith(".")
    assert "\n" not in item.statement
    assert set(item.reads) <= set(FIELDS)
    assert all(re.fullmatch(r"(TRT|VLL|SGL)-\d{2,3}", entry) for entry in item.museum)
    assert len(set(item.museum)) == len(item.museum)
    assert bool(item.predicates) is (item.slug not in OF_THE_RUN), "name the predicates that it holds"


@pytest.mark.parametrize("predicate", PREDICATES)
def test_each_predicate_is_held(predicate: str) -> None:
    assert any(predicate in i.predicates for i in all_invariants())


def test_kinds_are_told_apart() -> None:
    kinds = {i.slug: i.kind for i in all_invariants()}
    assert kinds["saved-state-empty"] == PREDICATE
    assert kinds["kv-content-equals-reference"] == REFERENCE
    assert kinds["replay-equals-eager"] == RELATION
    assert all((i.kind == RELATION) == isinstance(i, Relation) for i in all_invariants())


def test_a_slug_is_taken_once() -> None:
    with pytest.raises(ValueError, match="saved-state-empty is registered twice"):

        @invariant("saved-state-empty", reads=())
        def again(step: object, check: object) -> None:
            """Say it again."""


def test_an_invariant_states_something() -> None:
    with pytest.raises(ValueError, match="says-nothing states nothing"):

        @relation("says-nothing", reads=())
        def silent(scenario: object) -> None:
            pass

    with pytest.raises(ValueError, match="holds 'P15'; write one of P1, P2"):

        @relation("holds-too-much", reads=(), predicates=("P15",))
        def unknown(scenario: object) -> None:
            """Say something."""

    with pytest.raises(UsageError, match="none is called 'says-nothing'"):
        find("says-nothing")
