"""Scenarios without aim are valid, of the worker, and of all phases; a fault is one that strikes."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from scenarios import BACKENDS, WORKERS, Config, Phase, Scenario, check
from scenarios.acceptance import VARIANTS
from strategies.plain import plain_scenario

PASSED = {"draft_model.forward": 2}


def record(scenario: Scenario) -> Mapping[str, int]:
    assert check(scenario).steps[-1].fault is None
    return PASSED


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("worker", WORKERS)
def test_each_is_valid(worker: str) -> None:
    drawn = [
        plain_scenario(
            Random(number),
            worker=worker,
            backends=list(BACKENDS),
            variants=VARIANTS,
            sites=["draft_model.forward", "never.passed"],
            record=record,
        )
        for number in range(90)
    ]
    assert all(check(scenario).config.worker == worker for scenario in drawn)
    steps = [step for scenario in drawn for step in scenario.steps]
    assert {step.phase for step in steps} == set(Phase)
    faults = [step.fault for step in steps if step.fault is not None]
    assert faults
    assert all(fault.occurrence <= PASSED[fault.site] for fault in faults)
    asked = {name for name in VARIANTS for scenario in drawn if getattr(scenario.config, name) != getattr(Config, name)}
    assert asked
