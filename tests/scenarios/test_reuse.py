"""Block reuse as a scenario has it: who may ask for it, and what follows for the lengths of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Request,
    Scenario,
    ScenarioError,
    Step,
    check,
    dumps,
)
from scenarios import walk as walked
from scenarios.tracer import prompt

EAGLE3 = "Eagle3OneModelWorker"


def config(worker: str = EAGLE3, **fields: Any) -> Config:
    return Config(worker=worker, max_draft_len=1, enable_block_reuse=True, **fields)


def alike(request: int, prompt_len: int, prefix_len: int) -> Request:
    return Request(id=request, prompt_len=prompt_len, prefix_of=0, prefix_len=prefix_len)


def fill(request: int, chunk: int, *finish: int) -> Step:
    return Step(draft_len=1, contexts=(Context(request=request, chunk=chunk),), finish=finish)


def reused(scenario: Scenario) -> list[int]:
    """By context, in order: what it reuses."""
    rows = [row for _, plan in walked(scenario) for row in plan if row.is_context]
    assert all(row.past == row.reused for row in rows if row.reused)
    return [row.reused for row in rows]


@pytest.mark.parametrize(
    ("worker", "fields", "refused"),
    [
        ("DFlashWorker", {}, "config.enable_block_reuse"),
        ("MTPWorker", {}, "config.enable_block_reuse"),
        ("SAWorker", {"attention_backend": "VANILLA", "tokens_per_block": 256}, "config.enable_block_reuse"),
        (EAGLE3, {"recurrent": True}, "config.enable_block_reuse"),
    ],
)
def test_what_it_is_not_combined_with_is_refused_in_one_line(worker: str, fields: Any, refused: str) -> None:
    with pytest.raises(ScenarioError, match=f"^{refused}[^\n]*$"):
        check(Scenario(config=config(worker, **fields), requests=(Request(id=0, prompt_len=4),), steps=(fill(0, 4),)))


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"prefix_len": 2}, "prefix_len: 2 tokens are nobody's"),
        ({"prefix_of": 7}, "prefix_len: 0 is outside 1..4"),
        ({"prefix_of": 7, "prefix_len": 5}, "prefix_len: 5 is outside 1..4"),
        ({"prefix_of": -1, "prefix_len": 1}, "prefix_of: -1 is outside"),
        ({"prefix_of": 0, "prefix_len": 1}, "prefix_of: 0 is the request itself; name another, or leave it out"),
    ],
)
def test_a_prefix_has_a_source_and_a_length(fields: Any, refused: str) -> None:
    request = Request(id=0, prompt_len=4, **fields)
    with pytest.raises(ScenarioError, match=rf"requests\[0\]\.{refused}"):
        check(Scenario(config=config(), requests=(request,), steps=(fill(0, 4),)))


def test_a_prompt_begins_with_tokens_of_another_stream_and_goes_on_with_its_own() -> None:
    own, other = prompt(5, 3, 6), prompt(5, 9, 6)
    mixed = Request(id=3, prompt_len=6, prefix_of=9, prefix_len=4).prompt(5)
    assert mixed == [*other[:4], *own[4:]] != own


@pytest.mark.parametrize(
    ("worker", "prefix_len", "expected"),
    [(EAGLE3, 8, 4), (EAGLE3, 9, 8), (EAGLE3, 3, 0), ("PARDWorker", 8, 8), ("PARDWorker", 7, 4), ("SAWorker", 9, 8)],
)
def test_full_pages_are_reused_and_for_a_drafter_ahead_the_token_behind_counts(
    worker: str, prefix_len: int, expected: int
) -> None:
    steps = (fill(0, 10), fill(1, 12))
    requests = (Request(id=0, prompt_len=10), alike(1, 12, prefix_len))
    assert reused(Scenario(config=config(worker), requests=requests, steps=steps)) == [0, expected]


def test_a_token_is_left_to_compute_and_a_chunk_counts_what_is_reused() -> None:
    requests = (Request(id=0, prompt_len=10), alike(1, 8, 8), alike(2, 12, 10))
    steps = (fill(0, 10), fill(1, 8), fill(2, 10), fill(2, 2))
    scenario = Scenario(config=config("PARDWorker"), requests=requests, steps=steps)
    assert reused(scenario) == [0, 4, 8, 0]
    assert [plan[0].query for _, plan in walked(scenario)] == [10, 4, 2, 2]
    with pytest.raises(ScenarioError, match=r"steps\[2\]\.contexts\[0\]\.chunk: .* 8 tokens .* are reused"):
        check(replace(scenario, steps=(*steps[:2], fill(2, 8))))


def test_what_is_computed_in_chunks_is_known_at_its_end_and_not_within_a_step() -> None:
    requests = (Request(id=0, prompt_len=10), *(alike(i, 10, 10) for i in (1, 2, 3)))
    together = Step(draft_len=1, contexts=(Context(request=2, chunk=10), Context(request=0, chunk=5)))
    steps = (fill(0, 5), fill(1, 10), together, fill(3, 10))
    assert reused(Scenario(config=config(), requests=requests, steps=steps)) == [0, 0, 8, 0, 8]


def test_pages_of_two_sizes_are_reused_where_both_end() -> None:
    own = {"use_separate_draft_kv_cache": True, "draft_num_blocks": 64, "draft_tokens_per_block": 3}
    requests = (Request(id=0, prompt_len=30), alike(1, 30, 30))
    assert reused(Scenario(config=config(**own), requests=requests, steps=(fill(0, 30), fill(1, 30)))) == [0, 24]


def test_known_pages_give_way_to_those_that_need_them_the_last_ones_first() -> None:
    requests = (Request(id=0, prompt_len=13), Request(id=1, prompt_len=10), alike(2, 13, 13))
    steps = (fill(0, 13, 0), fill(1, 10, 1), fill(2, 13))
    # The first prompt leaves three known pages; the second needs three, of which the pool has one, two or three else.
    found = [reused(Scenario(config=config(num_blocks=n), requests=requests, steps=steps))[-1] for n in (4, 5, 6)]
    assert found == [4, 8, 12]


def test_a_failed_step_forgets_what_is_known() -> None:
    requests = (Request(id=0, prompt_len=10), alike(1, 10, 10), alike(2, 10, 10))
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    fails = Step(draft_len=1, generations=(Generation(request=0),), fault=fault)
    steps = (fill(0, 10), fails, fill(1, 10), fill(2, 10))
    assert reused(Scenario(config=config(), requests=requests, steps=steps)) == [0, 0, 8]


def test_with_overlap_a_prompt_is_known_when_its_step_is_processed() -> None:
    requests = (Request(id=0, prompt_len=10), alike(1, 10, 10), alike(2, 10, 10))
    steps = (fill(0, 10, 0), fill(1, 10), fill(2, 10))
    scenario = Scenario(config=config(overlap=True), requests=requests, steps=steps)
    assert reused(scenario) == [0, 0, 8]
    assert reused(replace(scenario, config=config())) == [0, 8, 8]


def test_shared_pages_count_once() -> None:
    requests = (Request(id=0, prompt_len=10), alike(1, 10, 10))
    steps = (fill(0, 10), fill(1, 10))
    scenario = Scenario(config=config(num_blocks=4), requests=requests, steps=steps)
    assert reused(scenario) == [0, 8]
    with pytest.raises(ScenarioError, match="6 KV-cache pages exceed num_blocks 4"):
        check(replace(scenario, config=replace(scenario.config, enable_block_reuse=False)))
    assert "enable_block_reuse" not in dumps(replace(scenario, config=Config(worker=EAGLE3, max_draft_len=1)))
