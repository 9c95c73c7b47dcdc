"""Whether a finding on a GPU is the GPU's alone: the same scenario is run on the CPU."""

from __future__ import annotations

from typing import Final

import fuzz.engines
from engines.base import run
from fuzz.alone import death
from fuzz.audit import PROCESS_SURVIVES, SUITE_ERRORS, ProcessEnded, surviving
from fuzz.journal import Case
from invariants import verify
from scenarios import Scenario, Trace

CUDA: Final = "cuda"
EVERYWHERE: Final = "CPU and GPU"
GPU_ONLY: Final = "GPU only"


def of_violation(engine: str, device: str, scenario: Scenario, slug: str) -> str | None:
    """Where the invariant is violated; None for a finding that no GPU was asked for."""
    if device != CUDA:
        return None
    ends = slug == PROCESS_SURVIVES
    try:
        on_cpu = fuzz.engines.load(engine, "cpu")

        def execute(twin: Scenario) -> Trace:
            with surviving():
                return run(on_cpu, twin)

        violations = verify(scenario, execute, only=None if ends else (slug,)).violations
    except ProcessEnded:
        return EVERYWHERE if ends else GPU_ONLY
    except SUITE_ERRORS:
        # It cannot be run there at all.
        return GPU_ONLY
    return EVERYWHERE if violations and not ends else GPU_ONLY


def of_death(engine: str, device: str, bug: str | None, scenario: Scenario, seconds: float) -> str | None:
    """Where the process dies, likewise."""
    if device != CUDA:
        return None
    return EVERYWHERE if death(Case(engine, "cpu", bug, scenario), seconds) else GPU_ONLY
