"""A session: what it watches, what it makes fail, what becomes of a failure, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.base import SEAMS, TORCH
from engines.portable import PortableEngine, PortableSession
from engines.portable.speculative.interface import SpecWorkerBase
from scenarios import FIELDS, Config, Fault, FaultKind, Phase, Request, Scenario, ScenarioError, Step, UsageError
from scenarios import WORKERS as TRAITS
from tests.engines.portable.scripts import ENGINE, context, dummies, generations, go, mixed, scenario
from tests.engines.portable.support import BLOCK, WORKERS

EAGLE = "Eagle3OneModelWorker"
CALLS = dict.fromkeys(("PARDWorker", *BLOCK), 1)
"""Draft calls for two drafts, where they are not two."""


def fault(site: str, kind: FaultKind = FaultKind.ERROR, occurrence: int = 1) -> Fault:
    return Fault(site=site, occurrence=occurrence, kind=kind)


def opened(case: Scenario, **options: Any) -> PortableSession:
    return ENGINE.open(case.config, case.requests, **options)


@pytest.mark.exhaustive(every=3, first=1)
@pytest.mark.parametrize("worker", WORKERS)
def test_substeps_and_fields_are_those_of_the_vocabulary(worker: str) -> None:
    trace = go(mixed(worker, 2, replay=True))
    drafts = ["saved", *(f"draft[{i}]" for i in range(CALLS.get(worker, 2)))] if TRAITS[worker].draft_model else []
    forward = ["entered", "verified", *drafts, "restored"]
    capture, prefill, joined = trace.steps[:3]
    assert [s.name for s in joined.substeps] == ["prepared", *forward, "updated"]
    # A block of drafts is for generations only.
    without = [] if worker in BLOCK else drafts[1:]
    assert [s.name for s in prefill.substeps if s.name.startswith("draft")] == without
    assert [s.name for s in capture.substeps] == ["prepared", *forward * 3, "updated"]
    phases = {s.run: s.phase for s in capture.substeps}
    assert phases == {0: "graph_warmup", 1: "graph_warmup", 2: "capture"}
    assert {s.phase for s in prefill.substeps} == {"eager"}
    assert {s.phase for s in trace.steps[-1].substeps} == {"replay"}
    for step in trace.steps:
        for substep in step.substeps:
            assert substep.fields.keys() <= FIELDS.keys()
    assert (trace.engine, trace.device) == ("portable", "cpu")
    assert trace.classes == {"forward_defined_in": ["SpecWorkerBase"]}


def test_equal_labels_mean_the_same_tensor() -> None:
    trace = go(mixed(EAGLE, 2, replay=True))
    labels = {(i, s.name, s.run): s["identity"] for i, step in enumerate(trace.steps) for s in step.substeps[:-1]}
    capture, replays = labels[0, "entered", 2], [labels[i, "entered", 0] for i in (5, 6)]
    assert replays == [capture] * 2
    prepared, saved = labels[1, "prepared", 0], labels[1, "saved", 0]
    changed = {name for name in prepared if prepared[name] != saved[name]}
    assert changed == {"_seq_lens", "_seq_lens_cuda"}
    assert labels[1, "restored", 0] == prepared


def test_nothing_is_recorded_when_nobody_watches() -> None:
    trace = go(mixed(EAGLE, 2), observe=False)
    assert [step.substeps for step in trace.steps] == [()] * 6
    assert {step.outcome for step in trace.steps} == {"ok"}


@pytest.mark.exhaustive(every=3, first=2)
@pytest.mark.parametrize("worker", WORKERS)
def test_sites_are_counted_and_equal_from_run_to_run(worker: str) -> None:
    case = mixed(worker, 2, replay=True)
    first, second = (go(case, observe=watched, record=(SEAMS, TORCH)) for watched in (True, False))
    assert [step.sites for step in first.steps] == [step.sites for step in second.steps]
    mixed_step, replay = first.steps[3].sites, first.steps[5].sites
    seams = ("draft_model.forward", "draft_model.logits", "worker.sample_draft_tokens", "sa_manager.extend")
    calls = [mixed_step.get(site, 0) for site in seams]
    assert calls == ([CALLS.get(worker, 2)] * 3 + [0] if TRAITS[worker].draft_model else [0, 0, 0, 1])
    assert first.steps[0].sites["cuda_graph.capture"] == 1
    assert "attn_metadata.restore_from_spec_dec" not in mixed_step
    # A replay runs no Python of model and worker.
    assert {site for site in replay if not site.startswith("torch.")} == {
        "kv_cache_manager.prepare_resources", "model_engine.prepare_inputs", "attn_metadata.prepare",
        "attn_metadata.on_update", "spec_metadata.prepare", "sampler.update_requests",
    }  # fmt: skip


def test_restore_code_is_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = SpecWorkerBase._restore_attn_metadata_from_spec_dec

    def watched(worker: SpecWorkerBase, attn_metadata: Any) -> None:
        torch.ones(1).flip(0)
        restore(worker, attn_metadata)

    monkeypatch.setattr(SpecWorkerBase, "_restore_attn_metadata_from_spec_dec", watched)
    case = mixed(EAGLE, 2)
    sites = opened(case, record=(TORCH,)).step(case.steps[0]).sites
    assert "torch.clone" in sites
    assert "torch.flip" not in sites


@pytest.mark.parametrize(
    ("phase", "kind", "outcome"),
    [
        (Phase.WARMUP, FaultKind.OOM, "tolerated"),
        (Phase.WARMUP, FaultKind.ERROR, "fatal"),
        (Phase.WARMUP, FaultKind.CUDA, "fatal"),
        (Phase.CAPTURE, FaultKind.OOM, "fatal"),
        (Phase.CAPTURE, FaultKind.ERROR, "fatal"),
        (Phase.EAGER, FaultKind.OOM, "tolerated"),
        (Phase.EAGER, FaultKind.ERROR, "tolerated"),
        (Phase.EAGER, FaultKind.CUDA, "fatal"),
    ],
)
def test_what_is_tolerated(phase: Phase, kind: FaultKind, outcome: str) -> None:
    rows = generations([0]) if phase is Phase.EAGER else dummies(4)
    first = () if phase.is_startup else (Step(draft_len=2, contexts=(context(EAGLE, 0, 5),)),)
    step = Step(phase=phase, draft_len=2, generations=rows, fault=fault("draft_model.forward", kind, 2))
    failed = go(scenario(EAGLE, (5,), *first, step)).steps[-1]
    assert (failed.outcome, failed.fired, failed.injected) == (outcome, 1, True)
    last = failed.substeps[-1]
    assert (last.name, last.run) == ("failed", 0)
    assert last["message"].endswith(f"(injected at draft_model.forward@2:{kind.value})")
    assert last["raised_at"]
    assert (last["kv_tokens"], last["free_blocks"]) == ({}, 64)


def test_serving_tolerates_failures_while_the_budget_lasts() -> None:
    steps = [Step(draft_len=2, contexts=(context(EAGLE, i, 5),), fault=fault("target_model.forward")) for i in range(3)]
    trace = go(scenario(EAGLE, (5, 5, 5), *steps, error_budget=2))
    assert [step.outcome for step in trace.steps] == ["tolerated", "tolerated", "fatal"]


def test_a_failure_ends_who_has_started_and_who_was_in_the_batch() -> None:
    case = scenario(
        EAGLE,
        (5, 5, 5, 5),
        Step(draft_len=2, contexts=(context(EAGLE, 0, 5), context(EAGLE, 1, 3))),
        Step(draft_len=2, contexts=(context(EAGLE, 2, 5),), fault=fault("attn_metadata.prepare")),
        Step(draft_len=2, contexts=(context(EAGLE, 3, 5),)),
    )
    session = opened(case)
    for step in case.steps:
        session.step(step)
    _, failed, last = session.trace().steps
    assert [s.name for s in failed.substeps] == ["failed"]
    assert "num_contexts" not in failed.substeps[0]
    assert (failed.substeps[0]["kv_blocks"], failed.substeps[0]["free_blocks"]) == ({}, 64)
    assert set(last.substeps[-1]["emitted"]) == {3}


def test_rows_of_requests_that_an_unplanned_failure_ended_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = mixed(EAGLE, 2)
    session = opened(case)
    session.step(case.steps[0])
    sampler = session._executor.sampler
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample_async", lambda *args: 1 / 0)
        failed = session.step(case.steps[1])
    assert (failed.outcome, failed.injected, failed.substeps[-1]["exception"]) == (
        "tolerated", False, "ZeroDivisionError"
    )  # fmt: skip
    partly, not_at_all = session.step(case.steps[2]), session.step(case.steps[4])
    assert partly.substeps[0]["request_ids"] == [2]
    assert [s.name for s in not_at_all.substeps[:1]] == ["prepared"]
    assert not_at_all.substeps[0]["request_ids"] == [2]
    assert session.step(replace(case.steps[4], generations=generations([0]))).substeps == ()


def test_nothing_is_read_of_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    case = mixed(EAGLE, 2)
    case = replace(case, config=replace(case.config, guided_decoding=True))
    session = opened(case)
    session.step(case.steps[0])

    def lost(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(session._executor.sampler, "sample_async", lost)
    monkeypatch.setattr(session._observer, "_on_cuda", True)
    failed = session.step(case.steps[1])
    fields = failed.substeps[-1].fields
    assert (failed.outcome, failed.injected) == ("fatal", False)
    assert "_seq_lens" in fields
    assert not {"_seq_lens_cuda", "kv_lens_cuda", "kv_cache_block_offsets", "matchers"} & fields.keys()


def test_a_step_that_could_not_come_next_is_refused() -> None:
    session = opened(mixed(EAGLE, 2))
    with pytest.raises(ScenarioError, match=r"steps\[0\].generations\[0\].request: request 0 still has 5"):
        session.step(Step(draft_len=2, generations=generations([0])))
    session.add(Request(id=9, prompt_len=2))
    assert session.step(Step(draft_len=2, contexts=(context(EAGLE, 9, 2),))).outcome == "ok"
    with pytest.raises(ScenarioError, match="id: 9 is taken"):
        session.add(Request(id=9, prompt_len=2))


def test_nothing_comes_after_a_fatal_failure() -> None:
    case = mixed(EAGLE, 2)
    session = opened(case)
    session.step(replace(case.steps[0], fault=fault("target_model.forward", FaultKind.CUDA)))
    with pytest.raises(UsageError, match="a fatal failure has ended the run"):
        session.step(case.steps[1])


def test_an_unknown_seam_is_refused() -> None:
    case = mixed(EAGLE, 2)
    with pytest.raises(ScenarioError, match=r"did you mean 'draft_model.forward'\?"):
        opened(case).step(replace(case.steps[0], fault=fault("draft_model.foward")))


def wrapped(session: PortableSession) -> list[str]:
    executor = session._executor
    engine: Any = executor.model_engine
    owners = [executor, engine, engine.attn_metadata, engine.spec_metadata, engine.model, engine.model.spec_worker]
    owners += [executor.kv_cache_manager, executor.sampler, engine.cuda_graph_runner]
    owners += [graph.attn_metadata for graph in engine.cuda_graph_runner.graphs.values()]
    calls: list[Callable[..., Any]] = [value for owner in owners for value in vars(owner).values() if callable(value)]
    return [getattr(call, "__name__", "") for call in calls if hasattr(call, "__wrapped__")]


def test_closing_takes_every_wrapper_off() -> None:
    case = mixed(EAGLE, 2, replay=True)
    session = opened(case)
    session.step(case.steps[0])
    assert {"prepare_resources", "on_update", "forward", "replay"} <= set(wrapped(session))
    graphs = session._executor.model_engine.cuda_graph_runner.graphs
    assert graphs
    session.close()
    assert wrapped(session) == []
    assert not graphs


def test_graph_metadata_has_hooks_of_its_own() -> None:
    case = mixed(EAGLE, 2, replay=True)
    session = opened(case)
    session.step(case.steps[0])
    engine = session._executor.model_engine
    (graph,) = engine.cuda_graph_runner.graphs.values()
    with torch.inference_mode():
        graph.attn_metadata.seq_lens = torch.tensor([5, 5], dtype=torch.int32)
    assert graph.attn_metadata.num_tokens == 10
    assert engine.attn_metadata.num_tokens == 0


@pytest.mark.parametrize(("device", "message"), [("tpu", "write 'cpu' or 'cuda'"), ("cuda", "finds no CUDA device")])
def test_devices_that_are_not_there(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        PortableEngine(device)


def test_a_configuration_that_is_not_valid_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"config.worker.*did you mean 'MTPEagleWorker'"):
        ENGINE.open(Config(worker="MTPEagelWorker", max_draft_len=2))
