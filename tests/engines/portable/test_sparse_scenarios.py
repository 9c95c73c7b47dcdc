"""Whole scenarios on the DSA backend: who attends to everything is dense, and detours leave no trace."""

from __future__ import annotations

from dataclasses import replace
from heapq import nlargest

import pytest

from engines.base import SEAMS, TORCH
from scenarios import Phase, Scenario, Step, check
from scenarios.tracer import PRIME, choose, entry, prompt_token, term
from tests.engines.portable.scripts import (
    accepted,
    believed,
    context,
    generations,
    go,
    mixed,
    results,
    scenario,
    updated,
)
from tests.engines.portable.support import LINEAR, SPARSE

ANY_PAGE = (
    *("kv_blocks", "connector_block_ids", "kv_cache_block_offsets", "spec_slots"),
    *("slot_mapping_fp8", "block_table", "indexer_k_cache_block_offsets", "block_table_expanded"),
)


def sparse(case: Scenario, topk: int, **options: int) -> Scenario:
    """The same scenario on the DSA backend."""
    return check(replace(case, config=replace(case.config, attention_backend="DSA", index_topk=topk, **options)))


def greedy(request: int, prompt_len: int, count: int, topk: int) -> list[int]:
    """What a sparse target alone says after a prompt."""
    tokens = [prompt_token(0, request, i) for i in range(prompt_len)]
    while len(tokens) < prompt_len + count:
        seen = nlargest(topk, (term(i, entry(i, token)) for i, token in enumerate(tokens)))
        tokens.append(choose(sum(seen) % PRIME))
    return tokens[prompt_len:]


@pytest.mark.exhaustive(every=3, first=2)
@pytest.mark.parametrize(("draft_len", "topk", "size"), [(1, 2, 4), (2, 1, 1), (4, 3, 2), (4, 500, 3)])
@pytest.mark.parametrize("worker", SPARSE)
def test_an_oracle_drafter_is_believed_in_every_layout(worker: str, draft_len: int, topk: int, size: int) -> None:
    """Pages of 1 to 4 tokens: the draft loop enters pages that the target's lengths do not reach."""
    case = mixed(worker, draft_len, replay=draft_len == 2)
    trace = go(sparse(case, topk, tokens_per_block=size, num_blocks=300))
    assert accepted(trace) == believed(worker, draft_len)
    for request, tokens in updated(trace, "emitted").items():
        assert tokens == greedy(request, (5, 7, 6)[request], len(tokens), topk)


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("worker", SPARSE)
def test_who_selects_everything_is_dense(worker: str) -> None:
    case = mixed(worker, 3, agree=2)
    everything, dense = go(sparse(case, 200)), go(case)
    for mine, other in zip(everything.steps, dense.steps, strict=True):
        for a, b in zip(mine.substeps, other.substeps, strict=True):
            # What flash MLA is told only dense attention has.
            shared = b.fields.keys() - {"identity", "kv_block_ids_per_seq", "gen_block_ids_per_seq"}
            assert {name: a[name] for name in shared} == {name: b[name] for name in shared}


@pytest.mark.exhaustive(every=3, first=1)
@pytest.mark.parametrize("worker", SPARSE)
def test_replays_equal_eager_steps(worker: str) -> None:
    case = sparse(mixed(worker, 3, replay=True, agree=2), 3)
    eager = replace(
        case, steps=tuple(replace(s, phase=Phase.EAGER) for s in case.steps if s.phase is not Phase.CAPTURE)
    )
    graph, by_python = go(case).steps, go(eager).steps
    # The dummies of the capture accept what the scenario says.
    assert graph[0].find("restored")["new_tokens_lens"] == [2, 2]  # type: ignore[index]
    for replayed, run_by_python in zip(graph[1:], by_python, strict=True):
        for name in ("entered", "restored", "updated"):
            mine, other = dict(replayed.find(name).fields), dict(run_by_python.find(name).fields)  # type: ignore[union-attr]
            for field in ("identity", "shared_with_eager", "left_open", "graph_key", *ANY_PAGE):
                mine.pop(field, None), other.pop(field, None)
            assert mine == other


@pytest.mark.exhaustive(every=3, first=2)
@pytest.mark.parametrize("worker", SPARSE)
def test_chunks_leave_what_one_prefill_leaves(worker: str) -> None:
    def text(*chunks: int) -> dict[str, object]:
        steps = [Step(draft_len=3, contexts=(context(worker, 0, n, 3),)) for n in chunks]
        steps += [Step(draft_len=3, generations=generations([0], 3))] * 2
        trace = go(sparse(scenario(worker, (9,), *steps), 4))
        return results(trace)

    assert text(9) == text(4, 5) == text(1, 2, 1, 4, 1)


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("worker", SPARSE)
def test_the_fields_are_there_when_a_forward_reads_them(worker: str) -> None:
    trace = go(sparse(mixed(worker, 2, replay=True), 3))
    for step in trace.steps:
        for substep in step.substeps:
            reads = substep.name in ("prepared", "entered") or substep.name.startswith("draft[")
            assert ("slot_owners" in substep) is ("max_gen_seq_len" in substep) is reads
            if reads:
                lens, kv = substep["_seq_lens"], substep["kv_lens_cuda"]
                owners = [[row, i] for row, (q, n) in enumerate(zip(lens, kv)) for i in range(n - q, n)]
                assert substep["slot_owners"] == owners
                assert substep["req_idx_per_token"] == [row for row, _ in owners]


@pytest.mark.parametrize("worker", LINEAR)
def test_the_calls_of_the_model_are_sites_and_its_arithmetic_is_none(worker: str) -> None:
    case = sparse(mixed(worker, 2), 3)
    sites = go(case, record=(SEAMS, TORCH), observe=False).steps[3].sites
    assert (sites["target_model.forward"], sites["draft_model.forward"]) == (1, 2)
    assert not {"torch.topk", "torch.scatter_", "torch.cummax"} & sites.keys()
    # The metadata's own: the map is rebuilt by the hook before the forward and after each draft.
    assert sites["torch.searchsorted"] == 3
