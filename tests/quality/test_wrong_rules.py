"""A wrong rule of the oracle is noticed, and by it alone: without it the same run holds.

The engine runs once per scenario, whatever rules are judged by its trace. ``python -m tests.quality.hunt`` has the
search look for all of them.
"""

from __future__ import annotations

from functools import cache

import pytest

import reference
from engines.base import run
from invariants import all_invariants, verify
from invariants.registry import REFERENCE, RELATION
from scenarios import Scenario, Trace
from tests.quality.hunt import main
from tests.quality.rule_cases import SCENARIOS
from tests.quality.wrong_rules import RULES, WrongRule, planted

pytest.importorskip("torch", reason="the portable engine needs torch")

from engines.portable import PortableEngine

OF_ONE_RUN = [i.slug for i in all_invariants() if i.kind != RELATION]


@cache
def traced(scenario: Scenario) -> Trace:
    trace = run(PortableEngine(), scenario)
    assert verify(scenario, lambda _: trace, only=OF_ONE_RUN).violations == ()
    return trace


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_each_is_noticed(rule: WrongRule) -> None:
    scenario = SCENARIOS[rule.scenario](rule.worker)
    assert scenario.config.worker == rule.worker
    trace = traced(scenario)
    with planted(rule.name):
        assert verify(scenario, lambda _: trace, only=OF_ONE_RUN).violations


def test_all_that_the_oracle_says_is_compared() -> None:
    """What no invariant compares with it, it could say as it likes; but for what is asked to be empty anyway."""
    compared = {field for i in all_invariants() if i.kind == REFERENCE for field in i.reads}
    compared |= {"left_open", "held_for_nobody"}
    scenarios = {make(rule.worker) for rule in RULES.values() for make in [SCENARIOS[rule.scenario]]}
    said = {f for s in scenarios for step in reference.trace(s).steps for sub in step.substeps for f in sub.fields}
    assert said <= compared


def test_the_hunt_finds_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contexts do not move", "PARD takes its drafts back"]) == 0
    assert "2 of 2 wrong rules found" in capsys.readouterr().out
