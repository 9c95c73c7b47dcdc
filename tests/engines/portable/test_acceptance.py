"""Forced acceptance, draft vocabularies, and the form of what workers return, over all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable.graphs import CpuGraph
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from engines.portable.pyexecutor.py_executor_creator import create_py_executor
from fuzz.small import small_scenario
from reference import outputs
from scenarios import Config, Context, Generation, Request, Step
from scenarios import forced_acceptance as forced
from scenarios.tracer import VOCAB_SIZE, d2t, draft_id
from tests.engines.portable.scripts import ENGINE
from tests.engines.portable.support import CPU, WORKERS, ints, tree_options

K = 3
TENSORS = ("new_tokens", "new_tokens_lens", "next_draft_tokens", "next_new_tokens")


def engine_of(worker: str, force: float = 0.0, **options: Any) -> PyTorchModelEngine:
    """An engine whose worker forces acceptance, where a scenario may ask for that or not."""
    engine = create_py_executor(Config(worker=worker, max_draft_len=K, **tree_options(worker, K), **options), CPU)
    engine.model_engine.model.spec_worker.set_force_num_accepted_tokens(force, CPU)
    engine.model_engine.spec_metadata.batch_indices_cuda.copy_(torch.arange(8))
    return engine.model_engine


def apply(engine: PyTorchModelEngine, natural: list[int], contexts: int = 1) -> list[int]:
    counts = ints(natural)
    engine.model.spec_worker._apply_force_accepted_tokens(counts, contexts, K, engine.spec_metadata)
    return counts.tolist()


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("force", [0.25, 1.5, 2.0, 3.0, 9.5])
def test_generations_accept_what_the_rule_says(worker: str, force: float) -> None:
    engine = engine_of(worker, force)
    for counter in range(1, 5):
        assert apply(engine, [1, 4, 1, 2]) == [1, *forced.counts(force, K, counter, 3)]
    counter = engine.model.spec_worker._force_accept_rng_counter
    assert (counter is None) == (force == int(force))
    assert counter is None or counter.item() == 4 * forced.draws(force, K)


def test_forced_or_not() -> None:
    engine = engine_of(WORKERS[0])
    assert apply(engine, [1, 4, 1]) == [1, 4, 1]
    engine = engine_of(WORKERS[0], 1.5)
    assert apply(engine, [1, 1], contexts=2) == [1, 1]
    assert engine.model.spec_worker._force_accept_rng_counter.item() == 1


def test_while_a_graph_warms_up_nothing_is_forced_and_each_replay_draws() -> None:
    engine = engine_of(WORKERS[0], 1.5)
    engine.spec_metadata.is_cuda_graph = True
    assert apply(engine, [4, 4, 4], contexts=0) == [4, 4, 4]
    worker, graph, counts = engine.model.spec_worker, CpuGraph(), ints([4, 4, 4])
    assert worker._force_accept_rng_counter.item() == 0
    with graph.capture():
        worker._apply_force_accepted_tokens(counts, 0, K, engine.spec_metadata)
    for counter in range(1, 5):
        assert counts.tolist() == forced.counts(1.5, K, counter, 3)
        graph.replay()


@pytest.mark.parametrize("worker", WORKERS)
def test_whoever_accepts_asks_the_rule(worker: str) -> None:
    """Also workers that no scenario forces, as the first generations of theirs verify placeholders."""
    case = small_scenario(worker)
    session = ENGINE.open(case.config, case.requests)
    session._model.spec_worker.set_force_num_accepted_tokens(1.0, CPU)
    session._plan.leave()
    session.step(case.steps[2])
    generations = Step(draft_len=2, generations=(Generation(request=0, agree=2),))
    (verified,) = (s for s in session.step(generations).substeps if s.name == "verified")
    assert verified["num_accepted_tokens"] == [2]
    session.close()


def observed(worker: str, draft_len: int) -> tuple[Any, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """A session that has computed two prompts and let them generate; arguments and outputs of each forward."""
    config = Config(worker=worker, max_draft_len=K, **tree_options(worker, K))
    session = ENGINE.open(config, (Request(id=0, prompt_len=5), Request(id=1, prompt_len=4)))
    model, calls = session._model.spec_worker, []
    forward = model._forward_impl

    def recorded(**kwargs: Any) -> Any:
        calls.append((kwargs, forward(**kwargs)))
        return calls[-1][1]

    model._forward_impl = recorded
    session.step(Step(draft_len=draft_len, contexts=(Context(request=0, chunk=5), Context(request=1, chunk=4))))
    session.step(Step(draft_len=draft_len, generations=(Generation(request=1), Generation(request=0))))
    return session, calls


def form(result: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    assert all(result[name].dtype is torch.int32 for name in TENSORS)
    assert set(result) == {"logits", *TENSORS}
    return {name: tuple(result[name].shape) for name in TENSORS}


@pytest.mark.parametrize(
    ("worker", "draft_len"),
    [(w, k) for w in WORKERS for k in (0, 2, K) if k == K or k >= Config(worker=w, max_draft_len=K).min_draft_len],
)
def test_outputs_have_the_form_that_the_sampler_expects(worker: str, draft_len: int) -> None:
    session, calls = observed(worker, draft_len)
    kind = outputs.NORMAL if draft_len else outputs.SKIP_DRAFTING
    assert len(calls) == 2
    for given, result in calls:
        assert form(result) == outputs.shapes(kind, session._config, 2, draft_len)
        assert result["logits"] is given["logits"]
    given, _ = calls[-1]
    attn = given["attn_metadata"]
    before = attn.kv_lens_cuda.clone(), attn._seq_lens_cuda, attn._seq_lens_cuda.clone()
    elsewhere = session._model.spec_worker.skip_forward(**given)
    assert form(elsewhere) == outputs.shapes(outputs.SKIP_FORWARD, session._config, 2, draft_len)
    assert elsewhere["logits"] is given["logits"]
    assert elsewhere["new_tokens_lens"].tolist() == [1, 1]
    assert attn._seq_lens_cuda is before[1]
    assert torch.equal(attn.kv_lens_cuda, before[0])
    assert torch.equal(attn._seq_lens_cuda, before[2])
    session.close()


@pytest.mark.parametrize("worker", [w for w in WORKERS if Config(worker=w, max_draft_len=K).traits.draft_vocab])
def test_drafts_are_mapped_to_the_target_s_vocabulary_once(worker: str) -> None:
    plain, own = engine_of(worker), engine_of(worker, draft_vocab_map=True)
    assert plain.model.spec_worker._d2t is None
    table = own.model.spec_worker._d2t
    assert table.tolist() == [d2t(i) for i in range(VOCAB_SIZE)]
    logits = torch.zeros(2, 3, VOCAB_SIZE)
    logits[..., draft_id(77)] = 2.0
    logits[..., draft_id(9)] = 1.0
    best = (77, 9) if own.spec_config.use_dynamic_tree else (77,)
    for shape in ((2, 3, VOCAB_SIZE), (6, VOCAB_SIZE)):
        tokens = own.model.spec_worker.sample_draft_tokens(logits.view(shape), own.spec_metadata)
        assert tokens.dtype is torch.int32
        assert {tuple(row) for row in tokens.view(6, -1).tolist()} == {best}
