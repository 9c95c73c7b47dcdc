"""CUDA graphs of the portable engine, for every worker, backend and part that adds buffers.

What is verified:

1. Eager = capture = replay on one batch: the warm-up forwards of a graph, its first run right after the capture and
   a further replay return the same and leave the same metadata and caches behind.
2. Eager = replay in service: what a replayed batch leaves behind, and every batch after it, is that of a twin which
   runs all of them by Python.
3. Capture with values A, replay with values B, for every host value: each field of ``prepared`` takes another value
   in a replay than in the capture, or is listed as part of the graph's shape; every replay is right by the oracle.
4. Static buffers hold nothing from step to step: with poison in all of them ahead of each step the trace is the same.
   It is not if a copy into one of them is left out.
5. Addresses are stable over growth: nothing that a graph reads or writes is freed while it can be replayed, when
   larger graphs, larger batches and failures come in between. It is freed with SGL-10 put back.
6. After each test the device still computes.

Each run takes half of the cases of a test, the next day's the others (``--whole``: all), and of 5 a third.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engines.portable import PortableSession
from engines.portable.pyexecutor.cuda_graph_runner import CapturedGraph, CUDAGraphRunner
from gpu_tests.driving import (
    CASES,
    DEVICE,
    IDS,
    K,
    config,
    differences,
    drive,
    dummies,
    executor,
    fields,
    generation,
    life,
    opened,
    overriding,
    runner,
)
from invariants import twins, verify
from museum import BUGS, seeded
from scenarios import WORKERS, Context, Fault, FaultKind, Phase, Request, Scenario, Step, Trace, check

POISON = -12_345
"""No token, position, length, page nor slot."""

FOLLOWED = {"input_ids", "position_ids", "kv_lens", "kv_lens_cuda", "draft_tokens", "block_ids_per_seq"}
"""Fields of ``prepared`` that must be others in some replay."""
OF_THE_SHAPE = {
    "num_contexts": "a graph holds generations only",
    "num_ctx_tokens": "likewise",
    "num_generations": "graphs are looked up by it",
    "num_tokens": "follows from it and from the draft length",
    "_seq_lens": "likewise",
    "_seq_lens_cuda": "likewise",
    "host_request_types": "likewise",
    "gather_ids": "likewise",
    "runtime_draft_len": "graphs are looked up by it",
    "runtime_tokens_per_gen_step": "follows from it",
    "req_idx_per_token": "follows from the shape",
    "spec_decoding_generation_lengths": "likewise",
    "spec_decoding_position_offsets": "likewise, of a chain",
    "spec_decoding_packed_mask": "likewise, of a chain",
    "spec_num_tokens": "follows from the shape",
    "num_capture_tokens": "likewise",
    "cu_seq_lens": "likewise",
    "_qo_indptr": "likewise",
    "_batch_indices": "likewise",
    "_paged_kv_indptr_prefill": "of contexts",
    "max_gen_seq_len": "follows from the draft length",
    "skip_indexer_for_ctx_reqs": "graphs skip nothing",
    "skip_indexer_for_gen_reqs": "graphs skip nothing",
    "topk_indices_buffer": "written where the indexer is skipped",
    "ctx_kv_indptr": "of contexts",
    "ctx_cached_token_indptr": "of contexts",
    "cu_seqlen_ks": "of contexts",
    "cu_seqlen_ke": "of contexts",
    "use_spec_decoding": "a worker that drafts sets it",
    "all_rank_num_tokens": "of several ranks",
    "_saved_tensors": "empty but inside a draft loop",
    "kv_cache_manager": "the target's but in a draft loop",
    "context_prompt_lookahead": "of contexts",
}
"""Fields of ``prepared`` that no replay changes, and why."""

MOVED = ("kv_lens_cuda", "sa_draft_tokens", "sa_match_len")
"""What a warm-up forward may leave otherwise: lengths that some workers save in it, drafts that follow its text."""

cases = pytest.mark.parametrize(("worker", "name"), CASES, ids=IDS)
half, third = pytest.mark.turns(2), pytest.mark.turns(3)


def one_row(worker: str) -> bool:
    """Whether dummies share a slot, so that of several rows on a GPU any may win."""
    return WORKERS[worker].keeps_context


@half
@cases
def test_eager_capture_and_replay_of_one_batch_are_equal(worker: str, name: str) -> None:
    pasts = (10,) if one_row(worker) else (10, 20)
    step = Step(draft_len=K, phase=Phase.CAPTURE, generations=dummies(worker, *pasts))
    # With host offload the pages would have moved on before the further replay.
    with opened(Scenario(config=config(worker, name, host_offload=False), steps=(step,))) as session:
        first, second, captured = (s for s in session.step(step).substeps if s.name == "restored")
        assert (first.phase, captured.phase) == ("graph_warmup", "capture")
        assert fields(first, *MOVED) == fields(second, *MOVED) == fields(captured, *MOVED)
        (graph,) = runner(session).graphs.values()
        outputs = {key: value.clone() for key, value in graph.outputs.items()}
        pools = [m.kv_cache_pools.clone() for m in executor(session).kv_cache_managers]
        assert graph.graph is not None
        with torch.inference_mode():
            graph.graph.replay()
        for key, value in outputs.items():
            assert torch.equal(value, graph.outputs[key]), key
        for before, manager in zip(pools, executor(session).kv_cache_managers, strict=True):
            assert torch.equal(before, manager.kv_cache_pools)


@half
@cases
def test_replays_are_their_eager_twins(worker: str, name: str) -> None:
    scenario = overriding(life(worker, name))
    twin = twins.eager(scenario)
    assert twin is not None
    replayed, eager = drive(scenario), drive(twin[0])
    for index, _ in twin[1]:
        one, other = (trace.steps[index] for trace in (replayed, eager))
        assert fields(one.find("updated"), "graph_key") == fields(other.find("updated"), "graph_key"), index
        there = one.find("restored"), other.find("restored")
        names = ("new_tokens", "new_tokens_lens", "next_draft_tokens", "next_new_tokens", "kv_lens_cuda")
        # FlashInfer keeps its lengths elsewhere.
        assert [there[0].fields.get(n) for n in names] == [there[1].fields.get(n) for n in names], index
    for one, other in zip(replayed.steps, eager.steps, strict=True):
        assert fields(one.find("updated"), "graph_key") == fields(other.find("updated"), "graph_key")


def changed(trace: Trace) -> tuple[set[str], set[str]]:
    """Fields of ``prepared`` in a capture, and those that have another value in some replay of its graph."""
    (captured,) = (step.find("prepared") for step in trace.steps if step.phase is Phase.CAPTURE)
    replays = [step.find("prepared") for step in trace.steps if step.phase is Phase.REPLAY]
    names = set(fields(captured))
    return names, {name for name in names if any(captured[name] != replay[name] for replay in replays)}


@half
@cases
def test_every_host_value_is_another_in_the_replay_and_is_followed(worker: str, name: str) -> None:
    scenario = overriding(life(worker, name))
    trace = drive(scenario)
    names, others = changed(trace)
    assert names - others <= OF_THE_SHAPE.keys()
    assert FOLLOWED & names <= others
    assert FOLLOWED - names <= {"kv_lens", "kv_lens_cuda"}, "FlashInfer keeps its lengths elsewhere"
    assert not verify(scenario, lambda _: trace, relations=False).violations


@torch.inference_mode()
def poison(session: PortableSession, step: Step) -> None:
    """Overwrite what a step has to write before it reads it: inputs, and what metadata is told of the batch."""
    wait_for_copies(session)
    engine = executor(session).model_engine
    for static in (*inputs(engine), *runner(session).static_inputs.values()):
        static.fill_(POISON)
    graphs = [graph.attn_metadata for graph in runner(session).graphs.values()]
    for metadata in (engine.attn_metadata, *graphs):
        for name in told(metadata):
            buffer = getattr(metadata, name)
            # Running totals begin with a 0 that is never written.
            (buffer[..., 1:] if "indptr" in name or "cu_" in name else buffer).fill_(POISON)


def wait_for_copies(session: PortableSession) -> None:
    """Let all copies have run: a step in flight may still have to read what is on the host."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    copies = session._copies
    assert copies is not None
    copies.synchronize(copies.record_event())


def inputs(engine: Any) -> list[torch.Tensor]:
    """Buffers that inputs, and what a step in flight corrects of them, are uploaded to; slots of rows as well."""
    names = ("input_ids_cuda", "position_ids_cuda", "gather_ids_cuda", "draft_tokens_cuda")
    found = [getattr(engine, name) for name in names]
    if engine.overlap is not None:
        found += [value for value in vars(engine.overlap).values() if isinstance(value, torch.Tensor)]
    spec, mamba = engine.spec_metadata, engine.attn_metadata.mamba_metadata
    slots = (spec, "batch_indices_cuda"), (spec, "batch_slot_ids"), (mamba, "state_indices")
    return found + [getattr(owner, name) for owner, name in slots if hasattr(owner, name)]


def told(metadata: Any) -> list[str]:
    """Buffers that ``prepare`` writes or that are derived from these: all of integers but constants and trees."""
    kept = ("_seq_lens", "_seq_lens_cuda", "_tokens", "_linear_offsets", "_linear_mask")
    return [
        name
        for name, value in vars(metadata).items()
        if isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.dtype is not torch.bool
        and name not in kept
        and not name.startswith("spec_decoding_")
    ]


@half
@cases
def test_poisoned_buffers_change_nothing(worker: str, name: str) -> None:
    scenario = overriding(life(worker, name))
    assert differences(drive(scenario, poison), drive(scenario)) == []


def test_poison_is_seen_where_a_copy_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = life("Eagle3OneModelWorker", "TRTLLM")
    right = drive(scenario)
    copy = CUDAGraphRunner._copy_to_static_inputs

    def all_but_positions(self: CUDAGraphRunner, inputs: dict[str, Any]) -> dict[str, Any]:
        held = self.static_inputs["position_ids"].clone()
        static = copy(self, inputs)
        self.static_inputs["position_ids"].copy_(held)
        return static

    monkeypatch.setattr(CUDAGraphRunner, "_copy_to_static_inputs", all_but_positions)

    @torch.inference_mode()
    def small(session: PortableSession, step: Step) -> None:
        # A position no sequence has here, and within what the tracer's tables hold.
        runner(session).static_inputs["position_ids"].fill_(1)

    assert differences(drive(scenario, small), right)


class Touched(TorchDispatchMode):
    """Notes the storages that were there before a captured region and that its operations were given."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, StorageWeakRef] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors((*args, *(kwargs or {}).values())):
            storage = tensor.untyped_storage()
            if tensor.device.type == DEVICE and storage._cdata not in self._made:
                self.known.setdefault(storage._cdata, StorageWeakRef(storage))
        for tensor in tensors(result if isinstance(result, tuple) else (result,)):
            if tensor.untyped_storage()._cdata not in self.known:
                self._made.add(tensor.untyped_storage()._cdata)
        return result

    def freed(self) -> int:
        """How many of them are no more."""
        return sum(storage.expired() for storage in self.known.values())

    def hold(self, graph: CapturedGraph) -> None:
        """Note which of them the metadata of the graph refers to, and under which names."""
        self._graph, self._held = graph, self._storages(graph)

    def left(self) -> list[str]:
        """Names under which the metadata now has something else than the graph knows."""
        now = self._storages(self._graph)
        return [name for name, storage in self._held.items() if storage in self.known and now[name] != storage]

    @staticmethod
    def _storages(graph: CapturedGraph) -> dict[str, int]:
        return {
            f"{owner}.{name}": value.untyped_storage()._cdata
            for owner in ("attn_metadata", "spec_metadata")
            for name, value in vars(getattr(graph, owner)).items()
            # New in each step, on the host; those of the emulation are where the device's are.
            if isinstance(value, torch.Tensor)
            and name not in ("kv_lens_runtime", "_seq_lens")
            and not name.startswith("host_")
        }


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, which nest at most in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Touched]]:
    """What each graph that is captured inside knows."""
    graphs: list[Touched] = []
    capture_graph = CUDAGraphRunner.capture_graph

    def capture(self: CUDAGraphRunner, key: Any, forward_fn: Any, static_inputs: Any) -> None:
        touched = Touched()

        def forward(inputs: Any) -> Any:
            with touched:
                return forward_fn(inputs)

        capture_graph(self, key, forward, static_inputs)
        touched.hold(self.graphs[key])
        graphs.append(touched)

    with monkeypatch.context() as patch:
        patch.setattr(CUDAGraphRunner, "capture_graph", capture)
        yield graphs


def growing(worker: str, name: str) -> Scenario:
    """A small graph, a larger one, a larger batch, a failure, and replays of the small graph after each of them."""
    agree = K if WORKERS[worker].drafts_for_contexts else 0
    once = Step(draft_len=K, phase=Phase.REPLAY, generations=(generation(0, 1),))
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    begin = Context(request=0, chunk=9, agree=agree)
    prompts = (9, *(3 + i for i in range(5)), 7)
    steps = (
        Step(draft_len=K, phase=Phase.CAPTURE, generations=dummies(worker, 8)),
        Step(draft_len=K, phase=Phase.CAPTURE, generations=dummies(worker, 8, 10, 12, 14)),
        Step(draft_len=K, contexts=(begin,)),
        once,
        Step(draft_len=K, contexts=tuple(Context(request=1 + i, chunk=3 + i) for i in range(5))),
        once,
        Step(draft_len=K, phase=Phase.REPLAY, generations=tuple(generation(i, K) for i in (1, 0, 3, 2))),
        Step(draft_len=K, generations=tuple(generation(i, K) for i in (5, 0, 3, 1, 4, 2))),
        Step(draft_len=K, generations=(generation(0, K),), fault=fault),
        Step(draft_len=K, contexts=(Context(request=6, chunk=7, agree=agree),)),
        replace(once, generations=(generation(6, 2),)),
        replace(once, generations=(generation(6, K),)),
    )
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompts))
    return check(Scenario(config=config(worker, name), requests=requests, steps=steps))


def astray(graphs: list[Touched]) -> list[Any]:
    """What these graphs know and is gone, or is no longer what their metadata has."""
    return [graph.freed() or graph.left() for graph in graphs if graph.freed() or graph.left()]


@third
@cases
def test_what_a_graph_knows_outlives_growth(worker: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = growing(worker, name)
    with watched(monkeypatch) as graphs, opened(scenario) as session:
        for step in scenario.steps:
            session.step(step)
            assert astray(graphs) == []
        trace = session.trace()
    assert len(graphs) == 2
    assert all(graph.known for graph in graphs)
    assert not verify(scenario, lambda _: trace, relations=False).violations


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.startswith("SGL-10/")])
def test_a_buffer_that_gives_way_to_a_larger_one_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = growing(BUGS[bug].worker, "TRTLLM")
    with seeded(bug), watched(monkeypatch) as graphs, opened(scenario) as session:
        for step in scenario.steps[:4]:
            session.step(step)
        assert astray(graphs)
