"""Drafters with a context of their own, DFlash and DSpark: worked examples from running upstream's DFlashWorker.

Where upstream loses columns silently the oracle does not: a step without drafts, a request left out of a batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from reference import trace
from scenarios import Config, Context, Fault, FaultKind, Generation, Phase, Request, Scenario, Step, StepTrace, check
from scenarios.tracer import EMPTY, MASK_TOKEN, PAD_TOKEN, entry, term
from tests.reference.cases import CONTEXT, DFLASH, DSPARK, at, last_step, serve


class Example(NamedTuple):
    """A layout, and the lengths that its step shows."""

    layout: dict[str, Any]
    kv0: list[int]
    seq_lens: list[int]
    drafting: list[int]
    columns: list[int]
    after: list[int]


EXAMPLES = [
    Example({}, [5, 14, 24], [5, 4, 4], [5, 15, 25], [13, 22], [5, 17, 26]),
    Example(
        {"contexts": (), "past": (4, 10, 20), "acc": (1, 4, 2)},
        [8, 14, 24], [4, 4, 4], [9, 15, 25], [5, 14, 22], [9, 18, 26],
    ),
    Example({"draft_len": 1, "acc": (1, 2)}, [5, 12, 22], [5, 2, 2], [5, 13, 23], [11, 22], [5, 13, 24]),
    Example({"draft_len": 2, "acc": (1, 3)}, [5, 13, 23], [5, 3, 3], [5, 14, 24], [11, 23], [5, 14, 26]),
    Example({"draft_len": 4, "acc": (1, 5)}, [5, 15, 25], [5, 5, 5], [5, 16, 26], [11, 25], [5, 16, 30]),
    Example(
        {"contexts": (), "draft_len": 1, "max_draft_len": 3, "acc": (2, 1)},
        [12, 22], [4, 4], [13, 23], [12, 21], [14, 23],
    ),
]  # fmt: skip


@pytest.mark.parametrize("worker", CONTEXT)
@pytest.mark.parametrize("example", EXAMPLES)
def test_lengths_of_a_step(worker: str, example: Example) -> None:
    step = serve(worker, **example.layout)
    (call,), entered, restored = step.named("draft"), at(step, "entered"), at(step, "restored")
    assert at(step, "prepared")["kv_lens_cuda"] == at(step, "saved")["kv_lens_cuda"] == example.kv0
    assert call["_seq_lens"] == call["_seq_lens_cuda"] == example.seq_lens
    assert call["kv_lens_cuda"] == example.drafting
    assert call["num_ctx_per_req"] == restored["ctx_len"] == example.columns
    assert entered["ctx_len"] == list(example.layout.get("past", (10, 20)))
    assert restored["kv_lens_cuda"] == example.after
    unchanged = ("num_contexts", "num_ctx_tokens", "num_generations", "num_tokens", "host_request_types")
    assert [call[name] for name in unchanged] == [entered[name] for name in unchanged]
    assert (call["use_spec_decoding"], call["_saved_tensors"]) == (True, ["_seq_lens", "_seq_lens_cuda"])
    assert "hidden_states" not in call


@pytest.mark.parametrize(("worker", "width"), [(DFLASH, 4), (DSPARK, 3)])
@pytest.mark.parametrize("draft_len", [1, 3])
def test_a_block_is_as_wide_as_the_longest_draft(worker: str, width: int, draft_len: int) -> None:
    step = serve(worker, draft_len=draft_len, max_draft_len=3, acc=(2, 1))
    (call,) = step.named("draft")
    last = [tokens[-1] for tokens in at(step, "verified")["accepted_tokens"][1:]]
    assert call["input_ids"] == [last[0], *[MASK_TOKEN] * (width - 1), last[1], *[MASK_TOKEN] * (width - 1)]
    assert call["position_ids"] == [*range(12, 12 + width), *range(21, 21 + width)]
    drafts = at(step, "restored")["next_draft_tokens"]
    assert drafts[0] == [PAD_TOKEN] * draft_len
    assert [len(row) for row in drafts] == [draft_len] * 3
    assert all(PAD_TOKEN not in row for row in drafts[1:])


@pytest.mark.parametrize("worker", CONTEXT)
def test_contexts_only_make_no_call(worker: str) -> None:
    step = serve(worker, contexts=(3, 2), past=(), acc=())
    assert [s.name for s in step.substeps] == ["prepared", "entered", "verified", "saved", "restored", "updated"]
    restored = at(step, "restored")
    assert at(step, "prepared")["kv_lens_cuda"] == restored["kv_lens_cuda"] == [3, 2]
    assert at(step, "entered")["ctx_len"] == restored["ctx_len"] == []
    assert restored["next_draft_tokens"] == [[PAD_TOKEN] * 3] * 2
    assert [len(columns) for columns in at(step, "updated")["draft_context"].values()] == [3, 2]


@pytest.mark.parametrize("worker", CONTEXT)
def test_a_step_without_drafts_grows_the_context_all_the_same(worker: str) -> None:
    step = serve(worker, contexts=(), draft_len=0, max_draft_len=3, acc=(1, 1))
    assert [s.name for s in step.substeps] == ["prepared", "entered", "restored", "updated"]
    restored = at(step, "restored")
    assert at(step, "prepared")["kv_lens_cuda"] == restored["kv_lens_cuda"] == [11, 21]
    assert (at(step, "entered")["ctx_len"], restored["ctx_len"]) == ([10, 20], [11, 21])
    assert restored["next_draft_tokens"] == [[], []]
    assert [len(columns) for columns in at(step, "updated")["draft_context"].values()] == [11, 21]


def _decode(*requests: int, draft_len: int = 3, agree: int = 0) -> Step:
    return Step(draft_len=draft_len, generations=tuple(Generation(request=i, agree=agree) for i in requests))


def _run(worker: str, *steps: Step) -> tuple[StepTrace, ...]:
    """A prompt of 9 and one of 11, then one token of each, then these steps."""
    requests = (Request(id=2, prompt_len=9), Request(id=3, prompt_len=11))
    prompts = Step(draft_len=3, contexts=tuple(Context(request=r.id, chunk=r.prompt_len) for r in requests))
    config = Config(worker=worker, max_draft_len=3)
    return trace(check(Scenario(config=config, requests=requests, steps=(prompts, *steps)))).steps[1:]


@pytest.mark.parametrize("worker", CONTEXT)
def test_no_hole_opens_while_the_draft_length_is_zero(worker: str) -> None:
    steps = _run(
        worker, _decode(2, agree=2), _decode(2), _decode(2, draft_len=0), _decode(2, draft_len=0), _decode(2, agree=1)
    )
    assert [at(step, "entered")["ctx_len"] for step in steps] == [[9], [10], [13], [14], [15]]
    assert at(steps[-1], "draft[0]")["position_ids"][0] == 16


@pytest.mark.parametrize("worker", CONTEXT)
def test_a_request_left_out_of_a_batch_keeps_its_context(worker: str) -> None:
    _, alone, both = _run(worker, _decode(2, 3), _decode(3), _decode(2, 3))
    assert at(alone, "entered")["ctx_len"] == [12]
    assert at(both, "entered")["ctx_len"] == [10, 13]
    assert {i: len(columns) for i, columns in at(alone, "updated")["draft_context"].items()} == {2: 10, 3: 13}


@pytest.mark.parametrize("worker", CONTEXT)
def test_a_column_is_what_its_token_adds_to_the_digest(worker: str) -> None:
    step = serve(worker, contexts=(), past=(10,), acc=(3,))
    updated = at(step, "updated")
    assert updated["draft_context"][0] == [[n, term(n, slot)] for n, slot in enumerate(updated["target_kv"][0])]
    accepted = at(step, "verified")["accepted_tokens"][0]
    assert updated["draft_context"][0][11:] == [[11 + j, term(11 + j, entry(11 + j, accepted[j]))] for j in range(2)]
    assert updated["draft_kv"] == {0: [EMPTY] * 13}


@pytest.mark.parametrize("worker", CONTEXT)
def test_of_dummies_only_what_follows_from_the_target_is_said(worker: str) -> None:
    dummies = (Generation(request=None, past=10, accept=3), Generation(request=None, past=20, accept=2))
    capture = Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies)
    step = last_step(Config(worker=worker, max_draft_len=3), (), capture)
    for run in range(3):
        call, restored = at(step, "draft[0]", run), at(step, "restored", run)
        assert restored["new_tokens_lens"] == [3, 2]
        assert call["input_ids"][0] == restored["new_tokens"][0][-1]
        assert (call["_seq_lens"], call["kv_lens_cuda"]) == ([4, 4], [15, 25])
        assert not {"position_ids", "num_ctx_per_req"} & set(call.fields)
        assert not {"ctx_len", "next_draft_tokens", "next_new_tokens"} & set(restored.fields)
    assert at(step, "updated")["draft_context"] == {}


@pytest.mark.parametrize("worker", CONTEXT)
def test_how_far_a_failed_step_got_is_left_open(worker: str) -> None:
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.OOM)
    failing = Step(draft_len=3, generations=(Generation(request=2),), fault=fault)
    (step,) = _run(worker, failing)
    assert "ctx_len" not in at(step, "failed")
    assert at(step, "failed")["kv_tokens"] == {}
