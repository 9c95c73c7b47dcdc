"""What workers keep per request, and drafters as upstream calls them."""

from __future__ import annotations

import pytest
import torch

from engines import TORCH, run
from engines.portable.heads import SteeredLogitsProcessor, Steering
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.tensorrt_llm import TensorrtLlmEngine
from engines.tensorrt_llm.drafters import DFlashDraftModel
from engines.tensorrt_llm.worker_state import WorkerContextObserver
from engines.tracer import Tracer
from scenarios import Config, Context, Generation, Phase, Request, Step
from tests.engines.tensorrt_llm.cases import KMAX, failing, life


@pytest.fixture
def session(tree):
    opened = []

    def make(worker):
        config = Config(worker=worker, max_draft_len=KMAX)
        engine = TensorrtLlmEngine(tree("post-fix"), device="cpu")
        opened.append(engine.open(config, tuple(Request(id=i, prompt_len=4) for i in range(2))))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def prompt(request):
    return Step(draft_len=KMAX, contexts=(Context(request=request, chunk=4),))


def test_slots_of_hidden_states_are_upstreams_and_dummies_give_theirs_back(session):
    mtp = session("MTPWorker")
    manager = mtp._executor.spec_resource_manager
    assert type(manager.manager).__module__ == "tensorrt_llm._torch.speculative.mtp"
    assert len(manager.mtp_past_tokens_pool) == mtp._config.num_blocks + 1
    dummies = Step(
        phase=Phase.WARMUP,
        draft_len=KMAX,
        contexts=(Context(request=None, chunk=4),),
        generations=(Generation(request=None, past=9),),
    )
    mtp.step(dummies)
    mtp.step(prompt(1))
    mtp.step(prompt(0))
    assert [manager.slot_manager.get_slot(request) for request in (1, 0)] == [0, 1]


def test_a_dummy_context_gets_its_slot_as_all_contexts_do(session):
    manager = session("MTPWorker")._executor.spec_resource_manager
    context = LlmRequest(7, [1, 1, 1], is_dummy=True)
    manager.add_dummy_requests([context])
    assert manager.slot_manager.get_slot(7) is None
    manager.prepare_resources(ScheduledRequests((context,)))
    assert manager.slot_manager.get_slot(7) == 0
    manager.free_resources(context)
    assert manager.slot_manager.get_slot(7) is None


def test_before_its_first_forward_a_worker_has_no_contexts(session):
    dflash = session("DFlashWorker")
    (entered,) = [s for s in dflash.step(prompt(0)).substeps if s.name == "entered"]
    assert entered["ctx_len"] == []
    dflash.step(prompt(1))
    observer = WorkerContextObserver(dflash.worker)
    request = LlmRequest(9, [1, 1], generated=[1])
    assert observer.content([request]) == {"draft_context": {9: []}}


def test_no_more_columns_are_read_than_the_worker_counts(session):
    dflash = session("DFlashWorker")
    dflash.step(prompt(0))
    observer, request = WorkerContextObserver(dflash.worker), LlmRequest(0, [1] * 4, generated=[1])
    whole = observer.content([request])["draft_context"][0]
    assert [position for position, _ in whole] == [0, 1, 2, 3]
    with torch.inference_mode():
        dflash.worker._ctx_len[dflash.worker._req_to_slot[0]] = 2
    assert observer.content([request])["draft_context"][0] == whole[:2]


def test_a_forward_that_fails_while_it_makes_its_buffers_is_observed(tree):
    engine, scenario = TensorrtLlmEngine(tree("settled"), device="cpu"), life("DFlashWorker")
    zeros = run(engine, scenario, record=[TORCH]).steps[0].sites["torch.zeros"]
    states = []
    for occurrence in range(1, zeros + 1):
        trace = run(engine, failing(scenario, 0, "torch.zeros", occurrence))
        assert [step.outcome for step in trace.steps] == ["tolerated", "ok", "ok"]
        states.append(trace.steps[0].find("failed").fields.get("ctx_len"))
    assert [0, 0] in states


def test_a_drafter_has_one_layer_with_one_head_and_its_columns_are_new():
    steering = Steering(2, torch.device("cpu"))
    model = DFlashDraftModel(Tracer(8, torch.device("cpu")), steering, SteeredLogitsProcessor(steering, parallel=True))
    positions, projected = torch.tensor([3, 4]), torch.tensor([7, 8])
    keys, values = model.precompute_context_kv(projected, positions)
    assert keys.shape == values.shape == (2, model._num_attn_layers, model._num_kv_heads, model._head_dim)
    keys.zero_()
    values.zero_()
    assert (positions.tolist(), projected.tolist()) == ([3, 4], [7, 8])
    assert model.fc.weight.dtype == torch.int64
    assert model.draft_model_full.model.embed_tokens(positions).tolist() == [[3], [4]]
