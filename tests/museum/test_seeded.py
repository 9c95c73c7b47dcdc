"""Each defect is seeded, noticed by the invariants that it names, and taken out again."""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from engines.base import run
from invariants import Relation, Verdict, all_invariants, verify
from museum import BUGS, Bug, seeded
from scenarios import Scenario, scenario_from_json
from tests.left_out import PartOf
from tests.museum.scenario_of import scenario_of

pytest.importorskip("torch", reason="the portable engine needs torch")

from engines.portable import PortableEngine

RUN = partial(run, PortableEngine())
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.json"))
UNSEEN = {
    "run-complete": "an engine that stops early and fails nothing: no public bug did; a process that dies is another",
}
"""Invariants that no seeded defect violates, and why."""


PREDICATES = frozenset(i.slug for i in all_invariants() if not isinstance(i, Relation))
RELATIONS = sorted(i.slug for i in all_invariants() if isinstance(i, Relation))


@cache
def clean(scenario: Scenario, relations: frozenset[str] = frozenset(RELATIONS)) -> Verdict:
    return verify(scenario, RUN, only=PREDICATES | relations)


def mechanism(bug: Bug) -> set[str]:
    """What a defect stands for: those that a plain run leaves out stand for nothing else."""
    return {bug.kind, *bug.caught_by[:1]}


@pytest.mark.exhaustive(shows=mechanism)
@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.id)
def test_each_is_noticed_in_its_scenario(bug: Bug) -> None:
    scenario = scenario_of(bug)
    assert scenario.config.worker == bug.worker
    with seeded(bug.id):
        verdict = verify(scenario, RUN, only=bug.caught_by)
    assert {violation.invariant for violation in verdict.violations} == set(bug.caught_by)


@pytest.mark.exhaustive(every=90)
@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.id)
def test_nothing_is_noticed_without_it(bug: Bug, part_of: PartOf) -> None:
    # Each relation is a run of its own.
    assert clean(scenario_of(bug), frozenset(part_of(RELATIONS, every=9))).violations == ()


def test_every_invariant_notices_some_real_bug() -> None:
    noticed = {slug for bug in BUGS.values() for slug in bug.caught_by}
    assert {i.slug for i in all_invariants()} - noticed == set(UNSEEN)


def _value(owner: Any, name: str) -> Any:
    return vars(sys.modules[owner] if isinstance(owner, str) else owner).get(name)


def _engine() -> dict[Any, Any]:
    """Every attribute of the portable engine's modules and classes."""
    modules = {name: vars(module) for name, module in sys.modules.items() if name.startswith("engines.")}
    classes = {value for names in modules.values() for value in names.values() if isinstance(value, type)}
    owners = {**modules, **{c: vars(c) for c in classes if c.__module__.startswith("engines.")}}
    return {(owner, name): value for owner, names in owners.items() for name, value in names.items()}


@pytest.mark.exhaustive
def test_each_is_taken_out_completely(part_of: PartOf) -> None:
    before = _engine()
    for bug in part_of([*BUGS.values()], every=4):
        with seeded(bug.id):
            within = _engine()
        changed = [key for key, value in within.items() if before.get(key) is not value]
        assert changed, bug.id
        # What it did not change it cannot have left behind.
        left = [(owner, name) for owner, name in changed if _value(owner, name) is not before.get((owner, name))]
        assert not left, bug.id
    assert _engine() == before


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_holds_and_fails_with_its_bug(path: Path) -> None:
    example = json.loads(path.read_text())
    scenario, bug = scenario_from_json(example["scenario"]), BUGS[example["bug"]]
    assert clean(scenario).violations == ()
    with seeded(bug.id):
        noticed = {violation.invariant for violation in verify(scenario, RUN).violations}
    assert noticed & set(bug.caught_by)
