"""Whole scenarios: an oracle drafter is believed, text is the target's own, and detours leave no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scenarios import WORKERS as TRAITS
from scenarios import Phase, Step
from scenarios.tracer import term
from tests.engines.portable.scripts import (
    ENGINE,
    accepted,
    believed,
    context,
    generations,
    go,
    greedy,
    mixed,
    results,
    scenario,
    updated,
)
from tests.engines.portable.support import BLOCK, CHUNKED, LINEAR, WORKERS


# What a replay at the larger draft length does, an eager step does: see below.
@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize(("draft_len", "replay"), [(1, True), (3, False)])
@pytest.mark.parametrize("worker", WORKERS)
def test_an_oracle_drafter_is_believed_in_every_layout(worker: str, draft_len: int, replay: bool) -> None:
    trace = go(mixed(worker, draft_len, replay=replay))
    assert accepted(trace) == believed(worker, draft_len)
    for request, tokens in updated(trace, "emitted").items():
        assert tokens == greedy(0, request, (5, 7, 6)[request], len(tokens))


@pytest.mark.parametrize("worker", BLOCK)
def test_a_context_has_the_columns_of_the_tokens_that_are_cached(worker: str) -> None:
    trace = go(mixed(worker, 3, replay=True, agree=1))
    for step in trace.steps[1:]:
        contexts, caches = step.substeps[-1]["draft_context"], step.substeps[-1]["target_kv"]
        assert contexts == {r: [[i, term(i, e)] for i, e in enumerate(slots)] for r, slots in caches.items()}
        assert not any(e for slots in step.substeps[-1]["draft_kv"].values() for e in slots)


@pytest.mark.parametrize("worker", BLOCK)
def test_more_requests_than_rows_take_turns_and_keep_their_contexts(worker: str) -> None:
    """Nothing but its end takes a request's slot, and the next owner finds nothing of it."""
    prefill = [Step(draft_len=2, contexts=(context(worker, i, 3 + i),)) for i in range(3)]
    turns = [Step(draft_len=k, generations=generations([i], k)) for k in (2, 0, 2, 2) for i in range(3)]
    turns[-1] = replace(turns[-1], finish=(2, 0))
    newcomer = [
        Step(draft_len=2, contexts=(context(worker, 3, 2),)),
        Step(draft_len=2, generations=generations([3], 2)),
    ]
    prompts = (3, 4, 5, 2)
    # As many slots as pages: the newcomer gets one that was another's.
    sizes = {"max_draft_len": 2, "max_num_requests": 1, "num_blocks": 3, "tokens_per_block": 32}
    trace = go(scenario(worker, prompts, *prefill, *turns, *newcomer, newcomer[1], **sizes))
    assert [row[0] for row in accepted(trace)] == [1] * 3 + [1] * 6 + [1] * 3 + [3] * 3 + [1, 1, 3]
    assert [len(columns) for columns in updated(trace, "draft_context").values()] == [10, 6]


@pytest.mark.exhaustive(every=4, first=1)
@pytest.mark.parametrize("worker", WORKERS)
def test_replays_equal_eager_steps(worker: str) -> None:
    graph = go(mixed(worker, 3, replay=True, agree=2))
    eager = go(mixed(worker, 3, agree=2))
    for replayed, run_by_python in zip(graph.steps[1:], eager.steps, strict=True):
        for name in ("restored", "updated"):
            mine, other = dict(replayed.find(name).fields), dict(run_by_python.find(name).fields)  # type: ignore[union-attr]
            pages = "kv_blocks", "connector_block_ids", "kv_cache_block_offsets"
            for field in ("identity", "left_open", "graph_key", "spec_slots", *pages):
                mine.pop(field, None), other.pop(field, None)
            assert mine == other
    names = [substep.name for substep in graph.steps[-1].substeps]
    assert names == ["prepared", "entered", "restored", "updated"]


@pytest.mark.parametrize("worker", ["MTPEagleWorker", "PARDWorker"])
def test_a_graph_can_be_captured_again(worker: str) -> None:
    once = mixed(worker, 2, replay=True)
    capture = replace(once.steps[0], generations=tuple(replace(g, past=g.past + 3) for g in once.steps[0].generations))
    twice = replace(once, steps=(once.steps[0], capture, *once.steps[1:]))
    assert results(go(twice)) == results(go(once))


@pytest.mark.exhaustive(every=4, first=2)
@pytest.mark.parametrize("worker", WORKERS)
def test_the_accepted_count_follows_what_the_scenario_says(worker: str) -> None:
    low = TRAITS[worker].min_draft_len
    plan = [(3, 2), (3, 0), (3, 3), (2, 2), (low, low), (3, 3), (1, 1), (3, 1), (3, 0)]
    if TRAITS[worker].fixed_draft_len:
        plan = [(3, agree) for _, agree in plan]
    steps = [Step(draft_len=3, contexts=(context(worker, 0, 4),))]
    steps += [Step(draft_len=k, generations=generations([0], agree)) for k, agree in plan]
    trace = go(scenario(worker, (4,), *steps))
    made, expected = 0, []
    for k, agree in plan:
        expected.append([1 + min(made, k)])
        made = agree
    assert accepted(trace)[1:] == expected
    tokens = updated(trace, "emitted")[0]
    assert tokens == greedy(0, 0, 4, 1 + sum(row[0] for row in expected))


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("worker", CHUNKED)
def test_chunks_leave_what_one_prefill_leaves(worker: str) -> None:
    def text(*chunks: int) -> dict[str, object]:
        steps = [Step(draft_len=3, contexts=(context(worker, 0, n, 3),)) for n in chunks]
        steps += [Step(draft_len=3, generations=generations([0], 3))] * 2
        trace = go(scenario(worker, (9,), *steps))
        assert [step.substeps[-1]["emitted"][0] for step in trace.steps[: len(chunks) - 1]] == [[]] * (len(chunks) - 1)
        return results(trace)

    assert text(9) == text(4, 5) == text(1, 2, 1, 4, 1)


@pytest.mark.parametrize("worker", LINEAR)
def test_the_drafters_cache_holds_the_tokens_after_their_positions(worker: str) -> None:
    trace = go(mixed(worker, 2))
    target, draft = updated(trace, "target_kv"), updated(trace, "draft_kv")
    for request, slots in target.items():
        assert draft[request][:-1] == [entry - 1024 for entry in slots[1:]]


def test_the_first_generated_token_never_reaches_a_parallel_drafter() -> None:
    trace = go(mixed("PARDWorker", 2))
    target, draft = updated(trace, "target_kv"), updated(trace, "draft_kv")
    for request, slots in target.items():
        missing = (5, 7, 6)[request]
        assert draft[request] == [0 if s == missing else entry for s, entry in enumerate(slots)]


@pytest.mark.exhaustive(every=4, first=3)
@pytest.mark.parametrize("worker", WORKERS)
def test_a_batch_gives_each_request_what_it_gets_alone(worker: str) -> None:
    together = go(mixed(worker, 3, agree=1))
    case = mixed(worker, 3)
    for request, prompt_len in ((0, 5), (2, 6)):
        session = ENGINE.open(case.config, case.requests)
        alone = session.step(Step(draft_len=3, contexts=(context(worker, request, prompt_len, 1),)))
        while len(alone.substeps[-1]["emitted"][request]) < len(updated(together, "emitted")[request]):
            alone = session.step(Step(draft_len=3, generations=generations([request], 1)))
        for field, values in results(together).items():
            if isinstance(values, dict):
                assert alone.substeps[-1][field][request] == values[request]


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("worker", WORKERS)
def test_startup_leaves_no_page_and_no_trace(worker: str) -> None:
    plain = mixed(worker, 2)
    warmup = Step(
        phase=Phase.WARMUP,
        draft_len=2,
        contexts=(context(worker, None, 9),),
        generations=mixed(worker, 2, replay=True).steps[0].generations,
    )
    warm = go(replace(plain, steps=(warmup, *plain.steps)))
    start = warm.steps[0].substeps[-1]
    assert start["free_blocks"] == plain.config.num_blocks
    assert {name for name, kept in start.fields.items() if kept} == {"free_blocks"}
    assert results(warm) == results(go(plain))
