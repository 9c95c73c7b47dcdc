"""Ranks of a pipeline: the last one has the worker, and tells the others what it returned.

They prepare the same batches, so what a rank knows of requests must be what the last one knows.
"""

from __future__ import annotations

from scenarios.errors import require
from scenarios.model import Config, Step


def piped_on(config: Config) -> bool:
    """Whether a configuration may have several ranks of a pipeline."""
    # How the nodes of a tree hang together is in no output of the worker.
    return not config.traits.tree


def check_pipeline(config: Config) -> None:
    """Raise ``ScenarioError`` for what is not combined with several ranks of a pipeline."""
    if config.pp_size > 1:
        problem = f"how the drafts of {config.worker} hang together is told to no other rank"
        require(piped_on(config), "config.pp_size", problem, "leave it out")


def check_piped(config: Config, step: Step, field: str) -> None:
    """Raise ``ScenarioError`` for a failure while other ranks wait for what the last one returns."""
    alone = config.pp_size == 1 or step.fault is None
    require(
        alone, f"{field}.fault", "the other ranks of the pipeline would wait for ever", "remove it or config.pp_size"
    )
