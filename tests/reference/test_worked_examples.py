"""The oracle against examples worked out by hand or by running upstream's classes, beyond those of both specifications.

The layout of most of them: one context of 5 tokens, two generations with 10 and 20 cached tokens, K = 3, of which
the target accepts 3 and 2 tokens.
"""

from __future__ import annotations

import pytest

from reference import trace
from reference.acceptance import agreed
from reference.batch import Row
from reference.history import Text
from reference.workers.linear import shifted
from scenarios import Config, Context, Generation, Phase, Request, Scenario, Step, Substep, check
from scenarios.tracer import EMPTY, MASK_TOKEN, PAD_TOKEN, entry
from tests.reference.cases import (
    ALL,
    DFLASH,
    DRAFT_TARGET,
    DSPARK,
    EAGLE3,
    LINEAR,
    MTP,
    MTP_EAGLE,
    PARD,
    TREES,
    at,
    last_step,
    serve,
)


def counters(substep: Substep) -> list[int]:
    return [substep[name] for name in ("num_contexts", "num_ctx_tokens", "num_generations", "num_tokens")]


@pytest.mark.parametrize("worker", LINEAR)
def test_lengths_in_the_linear_loop(worker: str) -> None:
    step = serve(worker)
    assert [s["kv_lens_cuda"] for s in step.named("draft")] == [[5, 14, 24], [6, 14, 23], [7, 15, 24]]
    assert at(step, "restored")["kv_lens_cuda"] == [8, 16, 25]
    assert at(step, "verified")["num_accepted_tokens"] == [1, 3, 2]
    for substep in step.named("prepared", "entered", "verified", "saved", "draft[0]"):
        assert (substep["_seq_lens"], counters(substep)) == ([5, 4, 4], [1, 5, 2, 13])
        assert (substep["use_spec_decoding"], substep["host_request_types"]) == (True, [0, 1, 1])
    for substep in (at(step, "draft[1]"), at(step, "draft[2]")):
        assert (substep["_seq_lens_cuda"], counters(substep)) == ([1, 1, 1], [0, 0, 3, 3])
        assert (substep["use_spec_decoding"], substep["host_request_types"]) == (False, [1, 1, 1])
        assert substep["_saved_tensors"] == ["_seq_lens", "_seq_lens_cuda"]


@pytest.mark.parametrize("worker", LINEAR)
def test_positions_in_the_linear_loop(worker: str) -> None:
    step = serve(worker)
    target = [*range(5), *range(10, 14), *range(20, 24)]
    assert [s["position_ids"] for s in step.named("draft")] == [target, [5, 13, 22], [6, 14, 23]]


@pytest.mark.parametrize("worker", ALL)
def test_the_worker_leaves_the_metadata_as_it_found_it(worker: str) -> None:
    step = serve(worker)
    before, after = at(step, "entered"), at(step, "restored")
    names = set(before.fields) - {"kv_lens_cuda", "ctx_len"}
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    assert after["_saved_tensors"] == []


def test_pard_drafts_in_one_call_one_position_ahead() -> None:
    step = serve(PARD)
    assert at(step, "prepared")["kv_lens_cuda"] == at(step, "saved")["kv_lens_cuda"] == [5, 16, 26]
    (call,) = step.named("draft")
    assert call["kv_lens_cuda"] == [5, 17, 27]
    assert (call["_seq_lens"], counters(call), call["use_spec_decoding"]) == ([5, 6, 6], [1, 5, 2, 17], True)
    assert call["position_ids"] == [*range(5), *range(11, 17), *range(21, 27)]
    first, second = at(step, "verified")["accepted_tokens"][1:]
    assert (len(first), len(second)) == (3, 2)
    assert call["input_ids"][:5] == at(step, "prepared")["input_ids"][:5]
    assert call["input_ids"][5:] == [*first, *[MASK_TOKEN] * 3, *second, *[MASK_TOKEN] * 4]
    assert at(step, "restored")["kv_lens_cuda"] == [5, 19, 28]


def test_a_prompt_of_pard_gets_no_drafts() -> None:
    next_drafts = at(serve(PARD), "restored")["next_draft_tokens"]
    assert next_drafts[0] == [PAD_TOKEN] * 5
    assert [drafts[3:] for drafts in next_drafts[1:]] == [[PAD_TOKEN] * 2] * 2
    assert PAD_TOKEN not in next_drafts[1][:3]


@pytest.mark.parametrize(
    ("worker", "kv0", "after_warmup", "after_capture", "saved"),
    [
        (EAGLE3, [14, 24], [16, 25], [16, 25], 2),
        (MTP_EAGLE, [14, 24], [16, 25], [16, 25], 2),
        (DRAFT_TARGET, [14, 24], [14, 24], [16, 25], 3),
        (PARD, [16, 26], [16, 26], [19, 28], 3),
        (DFLASH, [14, 24], [14, 24], [17, 26], 3),
        (DSPARK, [14, 24], [14, 24], [17, 26], 3),
    ],
)
def test_lengths_after_each_forward_of_a_capture(
    worker: str, kv0: list[int], after_warmup: list[int], after_capture: list[int], saved: int
) -> None:
    dummies = (Generation(request=None, past=10, accept=3), Generation(request=None, past=20, accept=2))
    capture = Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies)
    step = last_step(Config(worker=worker, max_draft_len=3), (), capture)
    phases = ["graph_warmup", "graph_warmup", "capture"]
    assert [s.phase for s in step.named("entered")] == phases
    assert [s["kv_lens_cuda"] for s in step.named("entered")] == [kv0] * 3
    assert [at(step, "verified", run)["num_accepted_tokens"] for run in range(3)] == [[3, 2]] * 3
    assert [s["kv_lens_cuda"] for s in step.named("restored")] == [after_warmup, after_warmup, after_capture]
    assert [len(s["_saved_tensors"]) for s in step.named("saved")] == [saved, saved, 2]


@pytest.mark.parametrize("worker", LINEAR)
def test_contexts_only(worker: str) -> None:
    step = serve(worker, contexts=(3, 2), past=(), acc=())
    assert at(step, "prepared")["kv_lens_cuda"] == [3, 2]
    assert at(step, "prepared")["gather_ids"] == [2, 4]
    assert at(step, "restored")["kv_lens_cuda"] == [6, 5]
    assert [len(drafts) for drafts in at(step, "restored")["next_draft_tokens"]] == [3, 3]


def test_contexts_only_with_a_parallel_drafter() -> None:
    step = serve(PARD, contexts=(3, 2), past=(), acc=())
    (call,) = step.named("draft")
    prepared, restored = at(step, "prepared"), at(step, "restored")
    assert call["input_ids"] == prepared["input_ids"]
    assert call["kv_lens_cuda"] == restored["kv_lens_cuda"] == [3, 2]
    assert restored["next_draft_tokens"] == [[PAD_TOKEN] * 5] * 2


@pytest.mark.parametrize(
    ("worker", "kv0", "after"), [(EAGLE3, [8, 14, 24], [8, 17, 25]), (PARD, [10, 16, 26], [11, 20, 28])]
)
def test_generations_only(worker: str, kv0: list[int], after: list[int]) -> None:
    step = serve(worker, contexts=(), past=(4, 10, 20), acc=(1, 4, 2))
    prepared = at(step, "prepared")
    assert prepared["kv_lens_cuda"] == kv0
    assert prepared["gather_ids"] == list(range(3 * prepared["runtime_tokens_per_gen_step"]))
    assert prepared["host_total_kv_lens"] == [0, sum(kv0)]
    assert at(step, "restored")["kv_lens_cuda"] == after


@pytest.mark.parametrize("worker", LINEAR)
def test_draft_length_zero_only_ingests(worker: str) -> None:
    step = serve(worker, acc=(1, 1), draft_len=0, max_draft_len=3)
    assert [s.name for s in step.substeps] == ["prepared", "entered", "draft[0]", "restored", "updated"]
    prepared, call, restored = at(step, "prepared"), at(step, "draft[0]"), at(step, "restored")
    metadata_names = set(at(step, "entered").fields)
    assert all(prepared[name] == call[name] == restored[name] for name in metadata_names)
    tokens = [new for (new,) in restored["new_tokens"]]
    assert call["input_ids"][-3:] == tokens
    assert restored["new_tokens_lens"] == [1, 1, 1]
    assert restored["next_draft_tokens"] == [[], [], []]
    assert restored["next_new_tokens"] == [[token] for token in tokens]


@pytest.mark.parametrize(("acc", "tokens", "pages"), [(1, 16, 4), (2, 17, 5), (4, 19, 5)])
def test_rewind(acc: int, tokens: int, pages: int) -> None:
    step = serve(EAGLE3, contexts=(), past=(10,), acc=(acc,))
    updated = at(step, "updated")
    assert updated["py_num_accepted_draft_tokens"] == {0: acc - 1}
    assert updated["py_rewind_len"] == {0: 4 - acc}
    # Before the step: 10 prompt tokens, K - 1 extra ones and room for 3 drafts.
    assert updated["kv_tokens"] == {0: tokens}
    assert updated["free_blocks"] == 64 - pages


@pytest.mark.parametrize(
    ("drafts", "nodes"), [([7, 8, 9], [0, 1, 2]), ([7, 8, 5], [0, 1, 2, 3]), ([1, 8, 5], [0]), ([], [0])]
)
def test_acceptance_stops_at_the_first_difference(drafts: list[int], nodes: list[int]) -> None:
    assert agreed([4, *drafts], [-1, 0, 1, 2], [7, 8, 5, 6]) == nodes


def test_a_shifted_context_ends_with_the_token_after_it() -> None:
    chunk = Row(0, True, Text([11, 12, 13, 14]), 4, 0, [11, 12, 13], [-1, 0, 1], 0, 0)
    tail = Row(1, True, Text([20, 21, 22, 23]), 4, 1, [21, 22], [-1, 0], 0, 0)
    assert shifted(chunk) + shifted(tail) == [12, 13, 14, 22, 23]


def test_the_next_step_starts_with_the_last_accepted_token() -> None:
    restored = at(serve(EAGLE3), "restored")
    assert [len(row) for row in restored["new_tokens"]] == restored["new_tokens_lens"] == [1, 3, 2]
    for accepted_row, drafts, tokens in zip(
        restored["new_tokens"], restored["next_draft_tokens"], restored["next_new_tokens"], strict=True
    ):
        assert tokens == [accepted_row[-1], *drafts]


@pytest.mark.parametrize(
    ("worker", "draft_lens", "kinds"),
    [
        (EAGLE3, (3, 1), "d"),
        (EAGLE3, (1, 3), "dpp"),
        (EAGLE3, (0, 2), "pp"),
        (PARD, (3, 1), "d"),
        (PARD, (1, 3), "dpppp"),
        (PARD, (3, 2), "ddp"),
        (PARD, (3, 3), "dddpp"),
        (DFLASH, (3, 1), "d"),
        (DFLASH, (1, 3), "dpp"),
        (DSPARK, (0, 2), "pp"),
    ],
)
def test_drafts_are_cut_or_padded_when_the_draft_length_changes(
    worker: str, draft_lens: tuple[int, int], kinds: str
) -> None:
    before, now = draft_lens
    generation = (Generation(request=0),)
    made = Step(draft_len=before, generations=generation)
    steps = [
        Step(draft_len=before, contexts=(Context(request=0, chunk=4),)),
        made,
        Step(draft_len=now, generations=generation),
    ]
    scenario = check(
        Scenario(
            config=Config(worker=worker, max_draft_len=3), requests=(Request(id=0, prompt_len=4),), steps=tuple(steps)
        )
    )
    _, first, second = trace(scenario).steps
    drafts = at(second, "prepared")["draft_tokens"]
    real = kinds.count("d")
    assert ["p" if token == PAD_TOKEN else "d" for token in drafts] == list(kinds)
    assert drafts[:real] == at(first, "restored")["next_draft_tokens"][0][:real]


def test_a_chunked_prompt_is_shifted_across_its_chunks() -> None:
    config = Config(worker=EAGLE3, max_draft_len=2)
    requests = (Request(id=0, prompt_len=5),)
    steps = [Step(draft_len=2, contexts=(Context(request=0, chunk=n),)) for n in (2, 3)]
    first, second = trace(check(Scenario(config=config, requests=requests, steps=tuple(steps)))).steps
    head, tail = at(first, "prepared")["input_ids"], at(second, "prepared")["input_ids"]
    assert at(second, "prepared")["position_ids"] == [2, 3, 4]
    assert at(second, "prepared")["kv_lens_cuda"] == [5]
    assert at(second, "prepared")["prompt_lens_cpu"] == [3]
    assert at(first, "draft[0]")["input_ids"] == [head[1], tail[0]]
    # What the target samples in the middle of a prompt is reported by the worker and given to nobody.
    (sampled,) = at(first, "restored")["new_tokens"][0]
    assert sampled != tail[0]
    assert at(first, "updated")["emitted"] == {0: []}
    assert at(second, "updated")["emitted"] == {0: at(second, "restored")["new_tokens"][0]}
    assert at(first, "updated")["kv_tokens"] == at(second, "updated")["kv_tokens"] == {0: 5 + 1 + 2}


def test_the_caches_after_a_generation_step_of_eagle() -> None:
    step = serve(EAGLE3, contexts=(), past=(10,), acc=(3,))
    updated, accepted_row = at(step, "updated"), at(step, "verified")["accepted_tokens"][0]
    slots = updated["draft_kv"][0]
    assert len(slots) == len(updated["target_kv"][0]) == 13
    assert slots[10:] == [entry(10 + j, token) for j, token in enumerate(accepted_row)]


def test_pard_never_sees_the_first_generated_token() -> None:
    updated = at(serve(PARD, contexts=(), past=(10,), acc=(3,)), "updated")
    target, slots = updated["target_kv"][0], updated["draft_kv"][0]
    assert slots[9] == EMPTY
    assert slots[:9] + slots[10:] == target[:9] + target[10:]


@pytest.mark.parametrize("worker", ALL)
def test_hidden_states_are_fed_to_the_eagle_family_and_mtp_only(worker: str) -> None:
    calls = list(serve(worker).named("draft"))
    fed = worker in (EAGLE3, MTP_EAGLE, MTP, *TREES)
    assert all(("hidden_states" in call) == fed for call in calls)
    assert all(len(call["hidden_states"]) == len(call["input_ids"]) for call in calls if fed)
    # The layers of vanilla MTP and the drafter of Eagle3's tree are not told how many tokens other ranks have.
    told = worker in (EAGLE3, MTP_EAGLE, "MTPEagleDynamicTreeWorker")
    assert all(("draft_all_rank_num_tokens" in call) == told for call in calls)
