"""The oracle against the worked examples of the workers: every row of their table, and every line below it."""

from __future__ import annotations

import pytest

from reference.batch import Row
from reference.history import Text
from reference.workers.mtp import length, span
from scenarios import Fault, FaultKind, Generation, Phase, ScenarioError, Step, StepTrace
from scenarios.tracer import PAD_TOKEN
from tests import worked_examples as examples
from tests.reference.cases import (
    CONTEXT,
    DFLASH,
    EAGLE3,
    LINEAR,
    MTP,
    MTP_EAGLE,
    PARD,
    TREES,
    at,
    configuration,
    last_step,
    serve,
)

LONG = {"num_blocks": 128}


def table_step(worker: str, fault: Fault | None = None) -> StepTrace:
    """The step that the table speaks of."""
    tree = examples.TREE
    sizes = {"dynamic_tree_max_topK": tree.topk, "max_total_draft_tokens": tree.nodes} if worker in TREES else {}
    return serve(
        worker,
        contexts=(examples.PROMPT,),
        past=tuple(examples.PAST),
        acc=tuple(examples.ACCEPTED[1:]),
        draft_len=examples.DRAFT_LEN,
        fault=fault,
        **LONG,
        **sizes,
    )


def fails_in(call: int) -> Fault:
    return Fault(site="draft_model.forward", occurrence=call, kind=FaultKind.OOM)


def later(step: StepTrace, forwards: int) -> list[int]:
    """KV lengths after so many forwards on one preparation, each of which moves them alike."""
    before, after = at(step, "entered")["kv_lens_cuda"], at(step, "restored")["kv_lens_cuda"]
    return [kv + forwards * (moved - kv) for kv, moved in zip(before, after, strict=True)]


@pytest.mark.parametrize("worker", examples.WORKERS)
def test_a_step_of_the_table(worker: str) -> None:
    example, step = examples.WORKERS[worker], table_step(worker)
    assert at(step, "verified")["num_accepted_tokens"] == examples.ACCEPTED
    assert at(step, "prepared")["kv_lens_cuda"] == example.kv0
    assert [call["kv_lens_cuda"] for call in step.named("draft")] == example.drafting
    assert [call["_seq_lens"] for call in step.named("draft")] == example.seq_lens
    restored = at(step, "restored")
    assert (restored["kv_lens_cuda"], restored["num_contexts"]) == (example.after, example.num_contexts_after)


@pytest.mark.parametrize("worker", examples.WORKERS)
def test_a_graph_of_the_table_warms_up(worker: str) -> None:
    # A graph has generations only; a dummy of a tree accepts no drafts, so its lengths are others.
    example = examples.WORKERS[worker]
    accepted = [1, 1] if worker in TREES else examples.ACCEPTED[1:]
    dummies = tuple(
        Generation(request=None, past=past, accept=accept)
        for past, accept in zip(examples.PAST, accepted, strict=True)
    )  # fmt: skip
    tree = examples.TREE
    sizes = {"dynamic_tree_max_topK": tree.topk, "max_total_draft_tokens": tree.nodes} if worker in TREES else {}
    capture = Step(phase=Phase.CAPTURE, draft_len=examples.DRAFT_LEN, generations=dummies)
    step = last_step(configuration(worker, examples.DRAFT_LEN, **LONG, **sizes), (), capture)
    restored = at(step, "restored", run=0)
    assert restored.phase == "graph_warmup"
    lost = [of_table - accept for of_table, accept in zip(examples.ACCEPTED[1:], accepted, strict=True)]
    if example.after_warmup == example.kv0:
        lost = [0, 0]
    expected = [kv - less for kv, less in zip(example.after_warmup[1:], lost, strict=True)]
    assert restored["kv_lens_cuda"] == expected
    # Each forward finds what was prepared, wherever the one before it left the lengths.
    assert [entered["kv_lens_cuda"] for entered in step.named("entered")] == [example.kv0[1:]] * 3


@pytest.mark.parametrize("worker", [PARD, *CONTEXT])
def test_a_failure_after_lengths_have_moved_on_completes_the_move(worker: str) -> None:
    step = table_step(worker, fails_in(1))
    assert step.outcome == "tolerated"
    # Where it strikes is open, so the oracle says no length of the failed step; the clean one has the last of them.
    assert "kv_lens_cuda" not in at(step, "failed")
    assert at(step, "restored")["kv_lens_cuda"] == examples.WORKERS[worker].after_failure


@pytest.mark.parametrize("worker", [EAGLE3, MTP_EAGLE])
def test_eagle_fails_in_its_second_draft_call(worker: str) -> None:
    example, step = examples.EAGLE_FAILURE_IN_DRAFT_1, table_step(worker, fails_in(2))
    call, failed = at(step, "draft[1]"), at(step, "failed")
    assert call["kv_lens_cuda"] == example.kv
    assert (failed["_seq_lens"], failed["_seq_lens_cuda"]) == (example.seq_lens, example.seq_lens)
    assert failed["num_contexts"] == example.num_contexts != example.num_contexts_upstream == call["num_contexts"]
    assert failed["_saved_tensors"] == []


@pytest.mark.parametrize("worker", LINEAR)
def test_rows_of_the_linear_loop(worker: str) -> None:
    calls = list(table_step(worker).named("draft"))
    assert [call["position_ids"] for call in calls] == examples.DRAFT_POSITIONS
    # A row that gets logits is followed by the next position in the next call.
    for call, rows, after in zip(calls, examples.GATHERED, calls[1:], strict=False):
        assert [call["position_ids"][row] + 1 for row in rows] == after["position_ids"]


def test_forwards_on_one_preparation() -> None:
    accepted = examples.EAGLE_WITHOUT_PREPARING.accepted
    eagle = serve(EAGLE3, contexts=(), past=tuple(examples.PAST), acc=tuple(accepted), draft_len=3)
    assert [later(eagle, n) for n in (1, 2, 3)] == examples.EAGLE_WITHOUT_PREPARING.kv
    assert later(table_step(MTP), 2) == examples.MTP_WITHOUT_PREPARING


@pytest.mark.parametrize("worker", CONTEXT)
@pytest.mark.parametrize("example", examples.DFLASH)
def test_other_blocks(worker: str, example: tuple[list[int], ...]) -> None:
    prompts, past, accepted, draft_len, kv0, during, after, first_positions = example
    step = serve(
        worker, contexts=tuple(prompts), past=tuple(past), acc=tuple(accepted), draft_len=draft_len, **LONG
    )  # fmt: skip
    (call,) = step.named("draft")
    assert [s["kv_lens_cuda"] for s in (at(step, "entered"), call, at(step, "restored"))] == [kv0, during, after]
    width = draft_len + (worker == DFLASH)
    assert call["position_ids"][::width] == call["num_ctx_per_req"] == first_positions
    columns = [n + acc for n, acc in zip(past, accepted, strict=True)]
    assert at(step, "restored")["ctx_len"] == columns == first_positions


@pytest.mark.parametrize("example", [e for e in examples.MTP if min(*e[0], *e[1]) >= e[3]])
def test_other_layers(example: tuple[list[int], ...]) -> None:
    prompts, past, accepted, draft_len, most, kv0, kv, seq_lens, positions = example
    step = serve(
        MTP,
        contexts=tuple(prompts),
        past=tuple(past),
        acc=tuple(accepted),
        draft_len=draft_len,
        max_draft_len=most,
    )
    calls = list(step.named("draft"))
    assert len(calls) == draft_len
    assert at(step, "prepared")["kv_lens_cuda"] == kv0
    assert all(call["kv_lens_cuda"] == kv and call["_seq_lens"] == seq_lens for call in calls)
    assert all(call["position_ids"][sum(prompts) :] == positions for call in calls)
    assert at(step, "restored")["kv_lens_cuda"] == kv


@pytest.mark.parametrize("example", [e for e in examples.MTP if min(*e[0], *e[1]) < e[3]])
def test_layers_over_requests_that_are_too_short_for_a_scenario(example: tuple[list[int], ...]) -> None:
    prompts, past, accepted, draft_len, _, kv0, kv, seq_lens, positions = example
    with pytest.raises(ScenarioError, match="feeds its last tokens again"):
        serve(MTP, contexts=tuple(prompts), past=tuple(past), acc=tuple(accepted), draft_len=draft_len)
    rows = [row_of(n, n, 0, is_context=True) for n in prompts]
    rows += [row_of(n, draft_len + 1, acc - 1) for n, acc in zip(past, accepted, strict=True)]
    spans = [span(row, draft_len) for row in rows]
    assert [row.kv for row in rows] == kv0
    assert [length(row, draft_len) for row in rows] == kv
    assert [len(looked_from) for looked_from in spans] == seq_lens
    assert [position for looked_from in spans[len(prompts) :] for position in looked_from] == positions


def row_of(past: int, query: int, accepted_drafts: int, *, is_context: bool = False) -> Row:
    """A row that is fed the greedy continuation of its request, of which only so many tokens are drafts to verify."""
    text, start = Text([7] * past if is_context else [7]), 0 if is_context else past
    tokens, parents = text.tokens(start, start + query), range(-1, query - 1)
    return Row(0, is_context, text, past or 1, start, tokens, parents, accepted_drafts, 0)


@pytest.mark.parametrize("worker", [*LINEAR, PARD, *CONTEXT])
def test_contexts_only(worker: str) -> None:
    example = examples.CONTEXTS_ONLY
    step = serve(worker, contexts=tuple(example.prompts), past=(), acc=(), draft_len=example.draft_len)
    prepared, restored = at(step, "prepared"), at(step, "restored")
    assert (prepared["kv_lens_cuda"], prepared["gather_ids"]) == (example.kv0, example.gathered)
    assert restored["new_tokens_lens"] == [1, 1]
    drafts = restored["next_draft_tokens"]
    if worker in LINEAR:
        assert restored["kv_lens_cuda"] == example.eagle_after
        assert (len(drafts), len(drafts[0])) == example.next_draft_tokens
        assert PAD_TOKEN not in drafts[0] + drafts[1]
    else:
        assert restored["kv_lens_cuda"] == example.kv0
        assert {token for row in drafts for token in row} == {PAD_TOKEN}


@pytest.mark.parametrize("worker", LINEAR)
def test_no_drafts(worker: str) -> None:
    example = examples.NO_DRAFTS
    step = serve(worker, acc=(1, 1), draft_len=0, max_draft_len=3)
    restored = at(step, "restored")
    rows, _ = example.new_tokens
    assert len(restored["new_tokens_lens"]) == rows
    for name in ("new_tokens", "next_draft_tokens", "next_new_tokens"):
        assert {(rows, len(row)) for row in restored[name]} == {getattr(example, name)}
    assert len(at(step, "prepared")["gather_ids"]) == rows
