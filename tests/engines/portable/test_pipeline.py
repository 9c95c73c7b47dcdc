"""Ranks of a pipeline: one that is not the last runs no worker, and is told what the last one's worker returned.

Each worker lives through requests that end up with different accepted counts, on both kinds of rank side by side. What
the host and the metadata of the other rank know before each forward must be what the last rank knows (vLLM #44697: it
kept the count that supposes every draft to be accepted, and its positions drifted).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from engines.portable.session import PortableSession
from scenarios import WORKERS as TRAITS
from scenarios import Scenario, StepTrace
from scenarios.trace import PREPARED, UPDATED
from tests.engines.portable.scripts import ENGINE
from tests.engines.portable.support import WORKERS
from tests.invariants.cases import served

_OF_THE_WORKER = {"identity", "slot_owners", "racing_copies"}
_TOLD = (
    *("emitted", "py_rewind_len", "py_num_accepted_draft_tokens", "kv_tokens", "kv_blocks", "free_blocks"),
    "connector_block_ids",
)
"""What the host makes of a step; caches and slots of drafters are the last rank's alone."""

Outputs = dict[str, Tensor]
Send = Callable[[Outputs, Outputs], Outputs]


def broadcast(placeholders: Outputs, of_the_last: Outputs) -> Outputs:
    """The placeholders have the form of the longest draft length; what is told has that of the step."""
    return {**placeholders, **{name: of_the_last[name].clone() for name in of_the_last if name != "logits"}}


def nothing_is_told(placeholders: Outputs, of_the_last: Outputs) -> Outputs:
    """One token per row, as the placeholders say, and drafts of the right form."""
    told = broadcast(placeholders, of_the_last)
    return {**told, "new_tokens_lens": placeholders["new_tokens_lens"]}


def side_by_side(scenario: Scenario, send: Send) -> list[tuple[StepTrace, StepTrace]]:
    """Each step on the last rank of a pipeline, and on another one."""
    last, other = (_opened(scenario) for _ in range(2))
    returned: list[Outputs] = []
    forward, skip = last._model.spec_worker.forward, other._model.spec_worker.skip_forward

    def kept(**given: Any) -> Outputs:
        returned.append(forward(**given))
        return returned[-1]

    def told(**given: Any) -> Outputs:
        return send(skip(**given), returned.pop(0))

    last._model.spec_worker.forward, other._model.spec_worker.forward = kept, told
    try:
        return [(last.step(step), other.step(step)) for step in scenario.steps]
    finally:
        last.close()
        other.close()


def _opened(scenario: Scenario) -> PortableSession:
    return ENGINE.open(scenario.config, scenario.requests)


def differences(pairs: list[tuple[StepTrace, StepTrace]]) -> set[str]:
    """Fields in which the ranks differ when a step is prepared, and when it is over."""
    found = set()
    for name in (PREPARED, UPDATED):
        for mine, other in pairs:
            seen, theirs = mine.find(name), other.find(name)
            assert seen is not None
            assert theirs is not None
            compared = _TOLD if name == UPDATED else [field for field in seen.fields if field not in _OF_THE_WORKER]
            found |= {field for field in compared if seen[field] != theirs[field]}
    return found


def _lived(worker: str, send: Send) -> set[str]:
    scenario = served(worker)
    return differences(side_by_side(replace(scenario, steps=scenario.steps[:5]), send))


@pytest.mark.parametrize("worker", WORKERS)
def test_a_rank_that_is_told_what_the_last_one_returned_prepares_the_same(worker: str) -> None:
    shape = {"spec_decoding_packed_mask", "spec_decoding_position_offsets", "position_ids"}
    # How the nodes of a tree hang together is in no output.
    assert _lived(worker, broadcast) == (shape if TRAITS[worker].tree else set())


@pytest.mark.parametrize("worker", WORKERS[:2])
def test_a_rank_that_is_told_nothing_drifts(worker: str) -> None:
    assert {"position_ids", "kv_lens_cuda", "emitted"} <= _lived(worker, nothing_is_told)
