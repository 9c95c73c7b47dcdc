"""The overlap scheduler: a step is launched while the host has yet to learn what the step before it came to.

Which configurations may have it, and what an iteration without a batch may say.
"""

from __future__ import annotations

from scenarios.errors import require
from scenarios.model import Config, Phase, Step
from scenarios.traits import BACKENDS


def overlaps_on(backend: str) -> bool:
    """Whether the overlap scheduler is combined with an attention backend, by name."""
    # Upstream corrects KV lengths on the device; a backend that keeps them on the host alone has none to correct.
    return not BACKENDS[backend].one_page


def check_overlap(config: Config) -> None:
    """Raise ``ScenarioError`` for what is not combined with the overlap scheduler."""
    require(
        not config.overlap or overlaps_on(config.attention_backend),
        "config.overlap",
        f"is not combined with {config.attention_backend}, where no KV length is corrected on the device",
        "leave one of them out",
    )


def check_idle(config: Config, step: Step, in_flight: bool, field: str) -> None:
    """Raise ``ScenarioError`` unless a step without rows is an iteration that only processes the step in flight."""
    require(config.overlap, field, "the batch is empty", "add a context or a generation")
    require(in_flight, field, "the batch is empty and no step is in flight", "add a context or a generation")
    phase = step.phase
    require(phase is Phase.EAGER, f"{field}.phase", f"is {phase.value} in a step without rows", "leave it out")
    require(not step.finish, f"{field}.finish", "nothing runs in a step without rows", "write it in the step before")
    require(step.fault is None, f"{field}.fault", "nothing runs in a step without rows", "remove it")
