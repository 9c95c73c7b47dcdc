"""Input preparation, and graphs on the whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from engines.portable.pyexecutor.py_executor_creator import create_py_executor
from engines.portable.speculative.interface import INVALID_PROMPT_LOOKAHEAD_TOKEN
from scenarios import Config
from scenarios.tracer import DUMMY_TOKEN, PAD_TOKEN, dummy_drafts
from tests.engines.portable.support import CPU, TREES, WORKERS, ints, tree_options


def engine_of(worker: str, **options: Any) -> PyTorchModelEngine:
    config = Config(worker=worker, max_draft_len=3, **tree_options(worker, 3) | options)
    return create_py_executor(config, CPU).model_engine


def generation(request_id: int, past: int, drafts: list[int]) -> LlmRequest:
    return LlmRequest(request_id, [9] * past, generated=[30 + request_id], py_draft_tokens=drafts)


def dummy(request_id: int, past: int, width: int) -> LlmRequest:
    """A generation that accepts 3 tokens of K = 3."""
    drafts = dummy_drafts(past, 3, 3) + [PAD_TOKEN] * (width - 3)
    return LlmRequest(request_id, [DUMMY_TOKEN] * past, generated=[DUMMY_TOKEN], is_dummy=True, py_draft_tokens=drafts)


def granted(engine: PyTorchModelEngine, contexts: list[LlmRequest], gens: list[LlmRequest]) -> ScheduledRequests:
    batch = ScheduledRequests(tuple(contexts), tuple(gens))
    engine.kv_cache_manager.add_dummy_requests(gens)
    engine.kv_cache_manager.prepare_resources(batch)
    slots = getattr(engine.spec_metadata, "spec_resource_manager", None)
    if slots is not None:
        for request in [*gens, *(c for c in contexts if not c.is_first_context_chunk)]:
            if slots.slot_manager.get_slot(request.py_request_id) is None:
                slots._add_slot(request)
        slots.prepare_resources(batch)
    return batch


def test_layout_of_a_mixed_batch() -> None:
    """A prompt of 5, generations with 10 and 20 tokens cached, K = 3."""
    engine = engine_of(WORKERS[0])
    context = LlmRequest(0, [1, 2, 3, 4, 5], context_chunk_size=5, py_draft_tokens=[0] * 3)
    batch = granted(engine, [context], [generation(1, 10, [7, 7, 8]), generation(2, 20, [6, 6, 0])])
    engine.spec_metadata.runtime_draft_len = 3
    inputs = engine._prepare_inputs(batch, engine.attn_metadata, engine.spec_metadata)
    attn, spec = inputs["attn_metadata"], inputs["spec_metadata"]
    assert attn.seq_lens.tolist() == [5, 4, 4]
    assert inputs["input_ids"].tolist() == [1, 2, 3, 4, 5, 31, 7, 7, 8, 32, 6, 6, 0]
    assert inputs["position_ids"].tolist() == [[*range(5), *range(10, 14), *range(20, 24)]]
    assert spec.gather_ids.tolist() == list(range(4, 13))
    assert spec.draft_tokens.tolist() == [7, 7, 8, 6, 6, 0]
    assert attn.kv_cache_params.num_cached_tokens_per_seq == [0, 10, 20]
    assert attn.kv_lens_cuda[:3].tolist() == [5, 14, 24]
    assert attn.prompt_lens == [5, 10, 20]
    assert (spec.num_generations, spec.num_capture_tokens, spec.seq_lens) == (2, 13, [5, 4, 4])


def test_a_chunk_goes_on_where_the_last_one_ended() -> None:
    engine = engine_of(WORKERS[0])
    requests = [
        LlmRequest(0, [1, 2, 3, 4, 5], context_current_position=2, context_chunk_size=2),
        LlmRequest(1, [6, 7], context_chunk_size=2),
    ]
    inputs = engine._prepare_inputs(granted(engine, requests, []), engine.attn_metadata, engine.spec_metadata)
    assert inputs["input_ids"].tolist() == [3, 4, 6, 7]
    assert inputs["position_ids"].tolist() == [[2, 3, 0, 1]]
    assert inputs["attn_metadata"].kv_lens_cuda[:2].tolist() == [4, 2]
    lookahead = inputs["spec_metadata"].context_prompt_lookahead_tokens[:2].tolist()
    assert lookahead == [5, INVALID_PROMPT_LOOKAHEAD_TOKEN]


def test_inputs_stay_in_their_buffers() -> None:
    engine = engine_of(WORKERS[0])
    gens = [generation(1, 10, [7, 7, 8])]
    first, second = (
        engine._prepare_inputs(granted(engine, [], gens), engine.attn_metadata, engine.spec_metadata) for _ in range(2)
    )
    for name in ("input_ids", "position_ids"):
        assert first[name].data_ptr() == second[name].data_ptr()


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("warmup_runs", [0, 1, 3])
def test_each_forward_of_a_capture_finds_what_prepare_wrote(
    worker: str, warmup_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = create_py_executor(Config(worker=worker, max_draft_len=3, graph_warmup_runs=warmup_runs), CPU)
    engine = executor.model_engine
    width = engine.spec_config.max_total_draft_tokens
    seen: list[list[int]] = []
    forward = engine.model.forward

    def watched(**kwargs: Any) -> Any:
        seen.append(kwargs["attn_metadata"].kv_lens_cuda[:2].tolist())
        return forward(**kwargs)

    monkeypatch.setattr(engine.model, "forward", watched)
    dummies = (dummy(1, 3, width), dummy(2, 6, width))
    accepted = 3
    if worker in TREES:
        # A dummy has no tree of drafts.
        accepted = 1
        for request in dummies:
            request.py_draft_tokens = [PAD_TOKEN] * width
    batch = ScheduledRequests(generation_requests=dummies)
    executor._prepare_resources(batch)
    outputs = engine.forward(batch, 3, capture=True)
    assert outputs["new_tokens_lens"].tolist() == [accepted] * 2
    kv0 = [4 + width, 7 + width]
    assert seen == [kv0] * (warmup_runs + 1)
    captured = engine.cuda_graph_runner.graphs[2, width, 2 * (1 + width)]
    assert captured.attn_metadata.kv_lens_cuda[:2].tolist() == kv0


def test_a_graph_is_replayed_with_the_metadata_of_its_capture() -> None:
    engine = engine_of(WORKERS[0])
    batch = granted(engine, [], [generation(1, 3, [0] * 3)])
    engine.forward(batch, 3, capture=True)
    inputs = engine._prepare_inputs(batch, engine.attn_metadata, engine.spec_metadata)
    with pytest.raises(AssertionError, match="the metadata of its capture"):
        engine.cuda_graph_runner.replay((1, 3, 4), inputs)


def test_only_a_captured_shape_can_be_replayed() -> None:
    engine = engine_of(WORKERS[0])
    batch = granted(engine, [], [generation(1, 3, [0] * 3)])
    with pytest.raises(AssertionError, match=r"no graph is captured for \(1, 3, 4\)"):
        engine.forward(batch, 3, use_cuda_graph=True)


def test_every_forward_starts_by_telling_that_kv_lens_may_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(WORKERS[0])
    inputs = {"attn_metadata": engine.attn_metadata}
    order: list[str] = []
    monkeypatch.setattr(engine.attn_metadata, "on_update_kv_lens", lambda: order.append("hook"))
    monkeypatch.setattr(engine.model, "forward", lambda **kwargs: order.append("model"))
    engine._forward_step(inputs)
    assert order == ["hook", "model"]


class Metadata:
    """Attention metadata as far as the graph runner knows it."""

    is_cuda_graph, num_seqs = True, 2

    def __init__(self) -> None:
        self.kv_lens_cuda = ints([5, 6, 99])
        self.updates = 0

    def create_cuda_graph_metadata(self, max_batch_size: int, **options: Any) -> Metadata:
        return self

    def on_update_kv_lens(self) -> None:
        self.updates += 1


def test_a_graph_reads_its_static_inputs() -> None:
    """Whatever tensors the inputs of a replay are."""
    runner, metadata = CUDAGraphRunner(2, 8, CPU), Metadata()

    def forward(inputs: dict[str, Any]) -> dict[str, Any]:
        metadata.kv_lens_cuda.add_(1)
        return {"sum": inputs["input_ids"] + inputs["position_ids"].squeeze(0)}

    def inputs(value: int) -> dict[str, Any]:
        return {"input_ids": ints([value] * 2), "position_ids": ints([[0, 1]]), "attn_metadata": metadata}

    runner.get_graph_metadata((2, 0, 2), metadata, metadata)
    outputs = runner.capture((2, 0, 2), forward, inputs(10), lambda inputs: None)
    assert metadata.kv_lens_cuda.tolist() == [5, 6, 102]
    assert metadata.updates == 3
    assert runner.replay((2, 0, 2), inputs(20)) is outputs
    assert outputs["sum"].tolist() == [20, 21]
    runner.clear()
    assert not runner.graphs
