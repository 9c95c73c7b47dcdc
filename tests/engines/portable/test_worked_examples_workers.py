"""The specification's worked examples of workers, on the whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios import WORKERS as TRAITS
from scenarios import Context, Fault, FaultKind, Generation, Phase, Scenario, Step
from scenarios.trace import StepTrace
from tests import worked_examples as examples
from tests.engines.portable.scripts import context, dummies, generations, go, scenario
from tests.engines.portable.support import BLOCK, LINEAR, TREES, Batch, state

WORKERS = tuple(examples.WORKERS)


def served(worker: str, fault: Fault | None = None, *more: Step) -> Scenario:
    """Two requests come to have 10 and 20 tokens cached, and drafts of which 2 and 1 are right; a third joins."""
    k, prompts = examples.DRAFT_LEN, [past - 1 for past in examples.PAST]
    right = [count - 1 for count in examples.ACCEPTED[1:]]
    return scenario(
        worker,
        (*prompts, examples.PROMPT, 4),
        Step(draft_len=k, contexts=tuple(context(worker, i, n) for i, n in enumerate(prompts))),
        Step(draft_len=k, generations=tuple(Generation(request=i, agree=n) for i, n in enumerate(right))),
        Step(
            draft_len=k, contexts=(context(worker, 2, examples.PROMPT),), generations=generations([0, 1]), fault=fault
        ),
        *more,
        max_draft_len=k,
    )


def made_up(worker: str, prompts: list[int], past: list[int], accepted: list[int], k: int) -> StepTrace:
    """A warm-up step of dummies with these lengths."""
    rows = tuple(Generation(request=None, past=p, accept=n) for p, n in zip(past, accepted))
    contexts = tuple(Context(request=None, chunk=n) for n in prompts)
    step = Step(phase=Phase.WARMUP, draft_len=k, contexts=contexts, generations=rows)
    return go(scenario(worker, (), step, max_draft_len=k)).steps[0]


def at(step: StepTrace, name: str) -> list[Any]:
    """Fields of all sub-steps whose name begins so."""
    return [substep.fields for substep in step.substeps if substep.name.startswith(name)]


def test_every_worker_has_an_example() -> None:
    assert set(WORKERS) == set(TRAITS)


@pytest.mark.parametrize("worker", WORKERS)
def test_a_step_of_each_worker(worker: str) -> None:
    example, step = examples.WORKERS[worker], go(served(worker)).steps[2]
    (entered,), drafts, (restored,) = at(step, "entered"), at(step, "draft["), at(step, "restored")
    assert at(step, "verified")[0]["num_accepted_tokens"] == examples.ACCEPTED
    assert entered["kv_lens_cuda"] == example.kv0
    assert [draft["kv_lens_cuda"] for draft in drafts] == example.drafting
    assert [draft["_seq_lens"] for draft in drafts] == example.seq_lens
    assert [draft["_seq_lens_cuda"] for draft in drafts] == example.seq_lens
    assert restored["kv_lens_cuda"] == example.after
    assert restored["num_contexts"] == example.num_contexts_after
    assert restored["_seq_lens"] == restored["_seq_lens_cuda"] == entered["_seq_lens"]


# A dummy's tree is invalid, so that it accepts one token and not what the table has.
@pytest.mark.parametrize("worker", [worker for worker in WORKERS if worker not in TREES])
def test_a_graph_that_warms_up(worker: str) -> None:
    example, (_, *accepted) = examples.WORKERS[worker], examples.ACCEPTED
    rows = tuple(Generation(request=None, past=p, accept=n) for p, n in zip(examples.PAST, accepted))
    k = examples.DRAFT_LEN
    (step,) = go(scenario(worker, (), Step(phase=Phase.CAPTURE, draft_len=k, generations=rows))).steps
    *warmups, captured = at(step, "restored")
    assert [fields["kv_lens_cuda"] for fields in warmups] == [example.after_warmup[1:]] * 2
    assert captured["kv_lens_cuda"] == example.after[1:]
    assert [fields["kv_lens_cuda"] for fields in at(step, "entered")] == [example.kv0[1:]] * 3


@pytest.mark.parametrize("worker", LINEAR)
def test_positions_of_a_linear_loop(worker: str) -> None:
    drafts = at(go(served(worker)).steps[2], "draft[")
    assert [draft["position_ids"] for draft in drafts] == examples.DRAFT_POSITIONS
    batch = Batch(worker, accepted=examples.ACCEPTED[1:])
    batch.forward()
    assert [call["gathered"] for call in batch.draft_model.calls] == examples.GATHERED


@pytest.mark.parametrize("worker", [w for w in WORKERS if hasattr(examples.WORKERS[w], "after_failure")])
def test_a_block_that_fails(worker: str) -> None:
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.ERROR)
    (failed,) = at(go(served(worker, fault)).steps[2], "failed")
    assert failed["kv_lens_cuda"] == examples.WORKERS[worker].after_failure
    assert failed["_saved_tensors"] == []


@pytest.mark.parametrize("worker", LINEAR[:2])
def test_a_loop_that_fails_in_its_second_call(worker: str) -> None:
    example = examples.EAGLE_FAILURE_IN_DRAFT_1
    fault = Fault(site="draft_model.forward", occurrence=2, kind=FaultKind.ERROR)
    after = Step(draft_len=3, contexts=(context(worker, 3, 4),))
    trace = go(served(worker, fault, after))
    (failed,) = at(trace.steps[2], "failed")
    assert failed["_seq_lens"] == failed["_seq_lens_cuda"] == example.seq_lens
    assert failed["kv_lens_cuda"] == example.kv
    assert failed["num_contexts"] == example.num_contexts
    assert failed["_saved_tensors"] == []
    assert trace.steps[3].outcome == "ok"


@pytest.mark.parametrize("worker", LINEAR[:2])
def test_forwards_of_a_loop_on_one_preparation(worker: str) -> None:
    example = examples.EAGLE_WITHOUT_PREPARING
    batch = Batch(worker, prompts=(), accepted=example.accepted)
    seen = []
    for _ in example.kv:
        batch.forward()
        seen.append(state(batch.attn)["kv"])
    assert seen == example.kv


@pytest.mark.parametrize("case", examples.DFLASH)
def test_dflash_with_other_batches(case: Any) -> None:
    prompts, past, accepted, k, kv0, drafting, after, first_positions = case
    batch = Batch(BLOCK[0], prompts=prompts, pasts=past, accepted=accepted, draft_len=k)
    assert state(batch.attn)["kv"] == kv0
    batch.forward()
    (call,) = batch.draft_model.calls
    assert (call["kv"], state(batch.attn)["kv"]) == (drafting, after)
    assert call["query_positions"][:: k + 1] == first_positions
    assert batch.worker._ctx_len[: len(past)].tolist() == first_positions


@pytest.mark.parametrize("case", [case for case in examples.MTP if min([3, *case[1]]) >= 3])
def test_mtp_with_other_batches(case: Any) -> None:
    prompts, past, accepted, k, _, kv0, after, seq_lens, positions = case
    step = made_up("MTPWorker", [max(n, k) for n in prompts] if not past else prompts, past, accepted, k)
    if not past:
        # The second prompt of the example is shorter than K, which the suite does not draw.
        kv0, after, seq_lens = ([max(n, k) for n in lens] for lens in (kv0, after, seq_lens))
    (entered,), drafts, (restored,) = at(step, "entered"), at(step, "draft["), at(step, "restored")
    assert entered["kv_lens_cuda"] == kv0
    assert [draft["kv_lens_cuda"] for draft in drafts] == [after] * k
    assert [draft["_seq_lens_cuda"] for draft in drafts] == [seq_lens] * k
    assert [draft["position_ids"][sum(prompts) :] for draft in drafts if past] == [positions] * (k if past else 0)
    assert restored["kv_lens_cuda"] == after
    assert restored["_seq_lens_cuda"] == entered["_seq_lens_cuda"]


@pytest.mark.parametrize("worker", [*LINEAR, "PARDWorker", BLOCK[0]])
def test_contexts_alone(worker: str) -> None:
    example = examples.CONTEXTS_ONLY
    batch = Batch(worker, prompts=example.prompts, pasts=(), accepted=())
    assert state(batch.attn)["kv"] == example.kv0
    outputs = batch.forward()
    # PARD fills up the draft slots of a step, which are more than K.
    assert tuple(outputs["next_draft_tokens"][:, : example.draft_len].shape) == example.next_draft_tokens
    if worker in LINEAR:
        assert batch.draft_model.calls[0]["gathered"] == example.gathered
        assert state(batch.attn)["kv"] == example.eagle_after
    else:
        # PARD's one call fills its cache.
        assert len(batch.draft_model.calls) == (worker == "PARDWorker")
        assert outputs["next_draft_tokens"].unique().tolist() == [0]
        assert state(batch.attn)["kv"] == example.kv0


@pytest.mark.parametrize("worker", [*LINEAR, *BLOCK])
def test_no_drafts(worker: str) -> None:
    outputs = Batch(worker, accepted=(1, 1), draft_len=0).forward()
    assert {name: tuple(outputs[name].shape) for name in vars(examples.NO_DRAFTS)} == vars(examples.NO_DRAFTS)


def test_a_dummy_of_a_graph() -> None:
    example = examples.GRAPH_DUMMY
    step = Step(phase=Phase.CAPTURE, draft_len=example.draft_len, generations=dummies(example.cached))
    (prepared,) = at(go(scenario(LINEAR[0], (), step)).steps[0], "prepared")
    assert prepared["_seq_lens"] == [example.seq_len]
    assert prepared["kv_lens_cuda"] == [example.kv]
    assert prepared["kv_lens"] == [example.kv + example.extra]
    assert prepared["prompt_lens_cpu"] == [example.prompt_len]
    assert len(prepared["kv_cache_block_offsets"][0]) == -(-example.granted // 4)
