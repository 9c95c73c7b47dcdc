"""Relaxed acceptance: which drafts a row takes, by the delta of its slot, and what the slots keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.eagle3 import Eagle3OneModelWorker
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.relaxed_acceptance import RelaxedDeltaManager
from engines.tracer import two_choices
from scenarios.tracer import NEAR_GAP, disagree, near

CPU = torch.device("cpu")
TARGET = [10, 20, 30]


def _accept(drafts: list[int], delta: float, topk: int = 2) -> tuple[list[int], int]:
    config = DecodingConfig(
        SpeculativeDecodingMode.EAGLE3_ONE_MODEL, 2, 1, 0,
        use_relaxed_acceptance_for_thinking=True, relaxed_topk=topk, relaxed_delta=0.5, begin_thinking_phase_token=99,
    )  # fmt: skip
    manager = RelaxedDeltaManager(4, relaxed=True, device=CPU)
    assert manager.relaxed_delta_pool is not None
    manager.relaxed_delta_pool[3] = delta
    attn: Any = SimpleNamespace(num_seqs=1, num_contexts=0)
    spec: Any = SimpleNamespace(
        verify_widths=None,
        draft_tokens=torch.tensor(drafts, dtype=torch.int32), runtime_draft_len=2,
        slot_ids=torch.tensor([3]), spec_resource_manager=manager,
    )  # fmt: skip
    logits = two_choices(torch.tensor(TARGET))
    tokens, counts = Eagle3OneModelWorker(config).sample_and_accept_draft_tokens(logits, attn, spec)
    return tokens[0].tolist(), int(counts)


@pytest.mark.parametrize(
    ("drafts", "delta", "topk", "expected"),
    [
        ([10, 20], 0.5, 2, ([10, 20, 30], 3)),
        ([near(10), near(20)], 0.5, 2, ([near(10), near(20), 30], 3)),
        ([near(10), disagree(20)], 0.5, 2, ([near(10), 20, 1], 2)),
        ([disagree(10), 20], 0.5, 4, ([10, 1, 1], 1)),
        ([near(10), 20], 0.0, 2, ([10, 1, 1], 1)),
        ([10, near(20)], 0.2, 2, ([10, 20, 1], 2)),
        ([near(10), 20], 0.5, 1, ([10, 1, 1], 1)),
    ],
)
def test_what_is_taken(drafts: list[int], delta: float, topk: int, expected: tuple[list[int], int]) -> None:
    assert _accept(drafts, delta, topk) == expected


def test_gap_between_the_first_two_choices() -> None:
    first, second, third = torch.softmax(two_choices(torch.tensor([10])), dim=1).topk(3).values[0].tolist()
    assert first - second == pytest.approx(NEAR_GAP, abs=1e-4)
    assert third < 1e-6


def test_a_slot_that_nobody_holds_has_no_delta() -> None:
    manager = RelaxedDeltaManager(2, relaxed=True, device=CPU)
    pool = manager.relaxed_delta_pool
    assert pool is not None
    requests = [LlmRequest(i, [1]) for i in (0, 1)]
    manager.prepare_resources(ScheduledRequests(tuple(requests)))
    pool.fill_(0.5)
    manager.free_resources(requests[0])
    # Upstream's looks up a slot that is not there, and clears the deltas of all.
    manager.free_resources(LlmRequest(7, [1]))
    assert sorted(pool.tolist()) == [0.0, 0.5]
