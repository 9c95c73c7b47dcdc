"""The register: what may be in it and what a reader finds there."""

from __future__ import annotations

import re

import pytest

from invariants import Predicate, Relation, all_invariants, find, invariant, relation
from invariants.registry import PREDICATE, REFERENCE, RELATION
from scenarios import FIELDS, UsageError


@pytest.mark.parametrize("item", all_invariants(), ids=lambda i: i.slug)
def test_each_is_well_described(item: Predicate | Relation) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", item.slug)
    assert item.statement[0].isupper() or item.statement.startswith("``")
    assert item.statement.endswith(".")
    assert "\n" not in item.statement
    assert set(item.reads) <= set(FIELDS)
    assert all(re.fullmatch(r"(TRT|VLL|SGL)-\d{2,3}", entry) for entry in item.museum)
    assert len(set(item.museum)) == len(item.museum)


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

    with pytest.raises(UsageError, match="none is called 'says-nothing'"):
        find("says-nothing")
