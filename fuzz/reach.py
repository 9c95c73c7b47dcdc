"""Whether a finding on a GPU is the GPU's alone: the same scenario is run on the CPU."""

from __future__ import annotations

from typing import Final

import fuzz.engines
from engines.base import run
from fuzz.alone import death
from fuzz.audit import SUITE_ERRORS
from fuzz.journal import Case
from invariants import verify
from scenarios import Scenario

CUDA: Final = "cuda"
EVERYWHERE: Final = "CPU and GPU"
GPU_ONLY: Final = "GPU only"


def of_violation(engine: str, device: str, scenario: Scenario, slug: str) -> str | None:
    """Where the invariant is violated; None for a finding that no GPU was asked for."""
    if device != CUDA:
        return None
    try:
        on_cpu = fuzz.engines.load(engine, "cpu")
        found = verify(scenario, lambda twin: run(on_cpu, twin), only=(slug,)).violations
    except SUITE_ERRORS:
        # It cannot be run there at all.
        return GPU_ONLY
    return EVERYWHERE if found else GPU_ONLY


def of_death(engine: str, device: str, bug: str | None, scenario: Scenario, seconds: float) -> str | None:
    """Where the process dies, likewise."""
    if device != CUDA:
        return None
    return EVERYWHERE if death(Case(engine, "cpu", bug, scenario), seconds) else GPU_ONLY
