"""What upstream's classes leave behind in their metadata, and what the next step makes of it."""

from __future__ import annotations

from typing import Any

from engines.leftovers import FIELDS, Leftover, differing, follow, see_through
from engines.tensorrt_llm import cpu
from scenarios import Scenario
from scenarios.trace import PREPARED

see_through(cpu.__file__)


def evidence(engine: Any, scenario: Scenario) -> dict[int, list[Leftover]]:
    """Step -> what it left behind in the metadata of eager steps, and what the next such step did with it.

    ``engine`` is a ``TensorrtLlmEngine``. The last step's leftovers are untouched: nothing follows it.
    """
    found: dict[int, list[Leftover]] = {}
    session = engine.open(scenario.config, scenario.requests)
    metadata = session.attn_metadata
    try:
        pending: list[Leftover] = []
        for index, step in enumerate(scenario.steps):
            with follow(metadata, pending) as followed:
                trace = session.step(step)
            if followed:
                found[index - 1] = followed
            prepared = trace.find(PREPARED)
            eager = prepared is not None and prepared.phase == "eager"
            pending = (
                differing(metadata, {f: prepared[f] for f in FIELDS if f in prepared.fields})
                if prepared is not None and eager
                else []
            )
            if pending:
                found[index] = pending
            if trace.outcome == "fatal":
                break
        return found
    finally:
        session.close()
