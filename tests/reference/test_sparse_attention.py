"""Sparse attention: the maps of the DSA backend, and texts of which the target sees a selection.

The worked examples of maps come from running upstream's class with and without PR #16925.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from reference import trace
from reference.attention import Sight
from reference.history import Text
from reference.sparse_attention import derived
from reference.workers import DraftCall
from scenarios import (
    Context,
    Fault,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    Step,
    Substep,
    check,
)
from scenarios.tracer import EMPTY, PRIME, choose, entry, prompt_token, term
from tests.reference.cases import (
    EAGLE3,
    LINEAR,
    PARD,
    SA,
    SPARSE,
    at,
    configuration,
    last_step,
    scenarios,
    serve,
)

DERIVED = {
    "req_idx_per_token",
    "slot_owners",
    "gen_kv_indptr",
    "gen_cached_token_indptr",
    "kv_lens_cuda_2d",
    "max_gen_seq_len",
}
CACHES = {"target_indexer_kv", "draft_indexer_kv"}


def forward(seq_lens: list[int], kv_lens: list[int], num_contexts: int = 0) -> DraftCall:
    return DraftCall([], [], seq_lens, kv_lens, num_contexts)


def owners(*spans: range) -> list[list[int]]:
    """Slots of rows that write these KV indices."""
    return [[row, index] for row, span in enumerate(spans) for index in span]


def prefix_sums(substep: Substep) -> list[list[int]]:
    return [substep["gen_kv_indptr"], substep["gen_cached_token_indptr"]]


# Maps


@pytest.mark.parametrize(
    ("seq_lens", "kv_lens", "rows", "positions"),
    [
        ([3, 1, 4, 1], [3, 9, 4, 2], [0, 0, 0, 1, 2, 2, 2, 2, 3], [0, 1, 2, 8, 0, 1, 2, 3, 1]),
        ([2, 0, 1], [2, 5, 7], [0, 0, 2], [0, 1, 6]),
        # What a tree makes of rows that had 5 tokens each.
        ([2, 2, 2], [15, 25, 12], [0, 0, 1, 1, 2, 2], [13, 14, 23, 24, 10, 11]),
    ],
)
def test_each_token_belongs_to_its_row(
    seq_lens: list[int], kv_lens: list[int], rows: list[int], positions: list[int]
) -> None:
    fields = derived(forward(seq_lens, kv_lens), configuration(EAGLE3, 4, index_topk=8), updated=False)
    assert fields["req_idx_per_token"] == rows
    assert fields["slot_owners"] == [list(pair) for pair in zip(rows, positions, strict=True)]
    assert fields["max_gen_seq_len"] == max(seq_lens)


@pytest.mark.parametrize("worker", LINEAR)
def test_eight_generations_with_four_drafts(worker: str) -> None:
    past = range(97, 168, 10)
    step = serve(
        worker,
        contexts=(),
        past=tuple(past),
        acc=(2,) * 8,
        draft_len=4,
        index_topk=64,
        num_blocks=512,
        max_num_tokens=2048,
        max_seq_len=256,
    )
    for substep in step.named("prepared", "entered", "draft[0]"):
        assert substep["req_idx_per_token"] == [row for row in range(8) for _ in range(5)]
        assert substep["slot_owners"] == owners(*(range(n, n + 5) for n in past))
    first = at(step, "draft[1]")
    assert first["kv_lens_cuda"] == list(range(100, 171, 10))
    # The map of five tokens per row would name rows 0, 0, 0, 0, 0, 1, 1, 1.
    assert first["req_idx_per_token"] == list(range(8))
    assert first["slot_owners"] == [[row, 99 + 10 * row] for row in range(8)]


@pytest.mark.parametrize("worker", LINEAR)
def test_the_draft_loop_over_two_generations(worker: str) -> None:
    step = serve(worker, contexts=(), past=(10, 20), acc=(2, 3), draft_len=2, index_topk=8)
    first, second = step.named("draft")
    assert first["kv_lens_cuda"] == [13, 23]
    assert first["slot_owners"] == owners(range(10, 13), range(20, 23))
    assert first["req_idx_per_token"] == [0, 0, 0, 1, 1, 1]
    assert second["kv_lens_cuda"] == [13, 24]
    assert second["slot_owners"] == [[0, 12], [1, 23]]
    assert second["req_idx_per_token"] == [0, 1]
    assert prefix_sums(first) == [[0, 13, 36], [0, 10, 30]]
    assert prefix_sums(second) == [[0, 13, 37], [0, 12, 35]]


@pytest.mark.parametrize("worker", LINEAR)
def test_the_draft_loop_over_a_mixed_batch(worker: str) -> None:
    step = serve(worker, contexts=(5,), past=(10, 20), acc=(2, 4), index_topk=8)
    calls = list(step.named("draft"))
    assert [call["kv_lens_cuda"] for call in calls] == [[5, 14, 24], [6, 13, 25], [7, 14, 26]]
    assert calls[0]["req_idx_per_token"] == [0] * 5 + [1] * 4 + [2] * 4
    assert calls[0]["slot_owners"] == owners(range(5), range(10, 14), range(20, 24))
    assert [call["slot_owners"] for call in calls[1:]] == [[[0, 5], [1, 12], [2, 24]], [[0, 6], [1, 13], [2, 25]]]
    # The context is a generation in the later calls.
    assert prefix_sums(calls[0]) == [[0, 14, 38], [0, 10, 30]]
    assert prefix_sums(calls[1]) == [[0, 6, 19, 44], [0, 5, 17, 41]]
    assert [call["max_gen_seq_len"] for call in calls] == [4, 1, 1]


def test_a_parallel_drafter_writes_one_position_ahead() -> None:
    step = serve(PARD, index_topk=8)
    prepared, call = at(step, "prepared"), at(step, "draft[0]")
    assert prepared["slot_owners"] == owners(range(5), range(10, 16), range(20, 26))
    assert call["slot_owners"] == owners(range(5), range(11, 17), range(21, 27))
    assert prefix_sums(call) == [[0, 17, 44], [0, 11, 32]]
    assert call["kv_lens_cuda_2d"] == [[17] * 4, [27] * 4]
    # Its one update comes before its one call.
    assert (prepared["max_gen_seq_len"], call["max_gen_seq_len"]) == (6, 1)


def test_lengths_have_a_column_for_the_longest_draft() -> None:
    step = serve(EAGLE3, draft_len=1, max_draft_len=3, acc=(2, 1), index_topk=8)
    assert at(step, "entered")["kv_lens_cuda_2d"] == [[12] * 4, [22] * 4]


@pytest.mark.parametrize("worker", SPARSE)
def test_without_generations(worker: str) -> None:
    prepared = at(serve(worker, contexts=(3, 1), past=(), acc=(), index_topk=8), "prepared")
    assert prepared["req_idx_per_token"] == [0, 0, 0, 1]
    assert prefix_sums(prepared) == [[0], [0]]
    assert (prepared["kv_lens_cuda_2d"], prepared["max_gen_seq_len"]) == ([], 0)


@pytest.mark.parametrize("worker", LINEAR)
def test_a_drafter_that_only_ingests_finds_the_layout_of_the_target(worker: str) -> None:
    step = serve(worker, acc=(1, 1), draft_len=0, max_draft_len=3, index_topk=8)
    prepared, call = at(step, "prepared"), at(step, "draft[0]")
    assert {name: call[name] for name in DERIVED} == {name: prepared[name] for name in DERIVED}
    assert call["max_gen_seq_len"] == 1


@pytest.mark.parametrize("worker", SPARSE)
def test_only_prepare_sets_the_longest_query_back(worker: str) -> None:
    config = configuration(worker, 3, index_topk=4)
    dummies = (Generation(request=None, past=10), Generation(request=None, past=20))
    captures = [Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies[:n]) for n in (1, 2)]
    for step in trace(check(Scenario(config=config, steps=tuple(captures)))).steps:
        width = config.tokens_per_gen_step(3)
        assert at(step, "prepared")["max_gen_seq_len"] == width
        # Without a draft model nothing expects one token per row.
        after = width if worker == SA else 1
        assert [s["max_gen_seq_len"] for s in step.named("entered")] == [width, after, after]
        # The other fields are rebuilt at the start of each forward.
        assert [s["slot_owners"] for s in step.named("entered")] == [at(step, "prepared")["slot_owners"]] * 3


@pytest.mark.parametrize("worker", SPARSE)
def test_the_fields_are_shown_before_each_forward_and_nowhere_else(worker: str) -> None:
    step = serve(worker, index_topk=8)
    shown = {"prepared", "entered", *(call.name for call in step.named("draft"))}
    for substep in step.substeps:
        expected = DERIVED if substep.name in shown else CACHES if substep.name == "updated" else set()
        assert (DERIVED | CACHES) & set(substep.fields) == expected
    assert not any((DERIVED | CACHES) & set(substep.fields) for substep in serve(worker).substeps)


def test_a_failure_leaves_them_unspecified() -> None:
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.OOM)
    step = Step(draft_len=2, contexts=(Context(request=0, chunk=3),), fault=fault)
    failed = at(last_step(configuration(EAGLE3, 2, index_topk=2), (Request(id=0, prompt_len=3),), step), "failed")
    assert not (DERIVED | CACHES) & set(failed.fields)


# Texts


def test_the_highest_scores_are_added_up() -> None:
    slots = [entry(n, token) for n, token in enumerate([7, 300, 5, 42])]
    scores = [term(n, slot) for n, slot in enumerate(slots)]
    reading = Sight(2).reading()
    for n, slot in enumerate(slots):
        assert reading.see(slot) == sum(sorted(scores[: n + 1])[-2:]) % PRIME
    assert reading.fork(3, 0).read(42) == reading.digest


def test_an_empty_slot_is_seen_by_dense_attention_only() -> None:
    dense, sparse = Sight().reading(), Sight(3).reading()
    for slot in (EMPTY, EMPTY, entry(2, 9), EMPTY):
        dense.see(slot)
        sparse.see(slot)
    filled = term(2, entry(2, 9))
    assert sparse.digest == filled
    assert dense.digest == (filled + sum(term(n, EMPTY) for n in (0, 1, 3))) % PRIME


def test_what_is_selected_changes_what_is_said() -> None:
    prompt = list(range(1, 9))
    said = {k: tuple(Text(prompt, sight=Sight(k)).tokens(8, 14)) for k in (0, 1, 2, 4, 14)}
    assert said[0] == said[14]
    assert len(set(said.values())) == 4


@pytest.mark.parametrize("worker", SPARSE)
def test_one_position_is_selected(worker: str) -> None:
    """With ``index_topk`` 1 the next token is told by the token of the highest score alone."""
    steps = [Step(draft_len=2, contexts=(Context(request=0, chunk=5),))]
    steps += [Step(draft_len=2, generations=(Generation(request=0, agree=1),))] * 3
    last = last_step(configuration(worker, 2, index_topk=1), (Request(id=0, prompt_len=5),), *steps)
    tokens = [prompt_token(0, 0, n) for n in range(5)]
    emitted = at(last, "updated")["emitted"][0]
    for _ in emitted:
        tokens.append(choose(max(term(n, entry(n, token)) for n, token in enumerate(tokens))))
    assert emitted == tokens[5:]


@pytest.mark.parametrize("worker", SPARSE)
@pytest.mark.parametrize("index_topk", [1, 2, 99])
def test_a_prompt_of_one_token(worker: str, index_topk: int) -> None:
    step = serve(worker, contexts=(1,), past=(), acc=(), index_topk=index_topk)
    # One slot is all there is, however many may be selected.
    first = choose(term(0, entry(0, prompt_token(0, 0, 0))))
    assert at(step, "restored")["new_tokens"] == [[first]]
    assert at(step, "prepared")["slot_owners"] == [[0, 0]]
    assert at(step, "updated")["target_indexer_kv"] == {0: [entry(0, prompt_token(0, 0, 0))]}
    assert at(step, "updated")["draft_indexer_kv"] == at(step, "updated")["draft_kv"]


@pytest.mark.parametrize("worker", SPARSE)
def test_the_indexer_is_given_what_the_model_is_given(worker: str) -> None:
    updated = at(serve(worker, index_topk=3), "updated")
    assert updated["target_indexer_kv"] == updated["target_kv"]
    assert updated["draft_indexer_kv"] == updated["draft_kv"]
    # PARD is never given the first generated token; a suffix automaton reads no cache.
    empty = updated["draft_indexer_kv"][1].count(EMPTY)
    assert empty == (1 if worker == PARD else len(updated["target_kv"][1]) if worker == SA else 0)


@pytest.mark.parametrize("worker", SPARSE)
@pytest.mark.parametrize("index_topk", [1, 3, 99])
def test_dummies_accept_what_they_are_told_to(worker: str, index_topk: int) -> None:
    dummies = (Generation(request=None, past=10, accept=3), Generation(request=None, past=0, accept=2))
    capture = Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies)
    step = last_step(configuration(worker, 3, index_topk), (), capture)
    assert [s["num_accepted_tokens"] for s in step.named("verified")] == [[3, 2]] * 3


def test_hidden_states_are_sparse_digests() -> None:
    dummy = Step(phase=Phase.WARMUP, draft_len=3, contexts=(Context(request=None, chunk=4),))
    warmup = last_step(configuration(EAGLE3, 3, index_topk=2), (), dummy)
    for step in (serve(EAGLE3, contexts=(4,), past=(), acc=(), index_topk=2), warmup):
        tokens = at(step, "prepared")["input_ids"]
        scores = [term(n, entry(n, token)) for n, token in enumerate(tokens)]
        digests = [sum(sorted(scores[: n + 1])[-2:]) % PRIME for n in range(4)]
        assert at(step, "draft[0]")["hidden_states"] == digests
        assert at(step, "restored")["new_tokens"] == [[choose(digests[-1])]]


@given(scenarios(SPARSE, index_topk=0))
def test_selecting_everything_is_dense_attention(scenario: Scenario) -> None:
    """But for empty slots, which dense attention sees: dummies have none here."""
    steps = tuple(
        replace(step, generations=tuple(replace(row, past=0) for row in step.generations)) for step in scenario.steps
    )
    dense = check(replace(scenario, steps=steps))
    everything = replace(dense.config, attention_backend="DSA", index_topk=dense.config.max_seq_len)
    sparse = check(replace(dense, config=everything))
    for expected, taken in zip(trace(dense).steps, trace(sparse).steps, strict=True):
        assert [s.key for s in taken.substeps] == [s.key for s in expected.substeps]
        for before, after in zip(expected.substeps, taken.substeps, strict=True):
            assert {name: after[name] for name in before.fields} == before.fields
