"""Which scenario shows which seeded defect."""

from __future__ import annotations

from typing import Final

from museum import Bug
from scenarios import Scenario
from tests.museum import (
    acceptance_cases,
    backend_cases,
    cases,
    edge_cases,
    enhancer_cases,
    guided_cases,
    overlap_cases,
    ragged_cases,
    rank_cases,
    reuse_cases,
    row_cases,
    sparse_cases,
)

_MODULES: Final = (
    cases,
    acceptance_cases,
    backend_cases,
    edge_cases,
    enhancer_cases,
    guided_cases,
    overlap_cases,
    ragged_cases,
    rank_cases,
    reuse_cases,
    row_cases,
    sparse_cases,
)
SCENARIOS: Final = {key: make for module in _MODULES for key, make in module.SCENARIOS.items()}
"""Museum entry and variant -> scenario; a worker is named where it needs one of its own."""


def scenario_of(bug: Bug) -> Scenario:
    """The scenario of a defect, for the worker that it is hunted in."""
    entry, worker, *variant = bug.id.split("/")
    make = SCENARIOS.get(bug.id) or SCENARIOS["/".join((entry, *variant))]
    return make(worker)
