"""Driving the classes of a source tree: the same scenarios, seams and traces as for the portable engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

import fuzz.engines
from engines import SEAMS, TORCH, run
from engines.portable import PortableEngine
from engines.tensorrt_llm import KEYWORD, POSITIONAL, TensorrtLlmEngine
from engines.tensorrt_llm.backend import linear_tables
from engines.upstream import DRIVEN
from invariants import verify
from scenarios import WORKERS, Config, Phase, ScenarioError, Step, UsageError, check
from tests.engines.tensorrt_llm.cases import KMAX, chunked, failing, life, lives, varying
from tests.fixtures.tensorrt_llm_tree import LAYOUTS

FLASH_MLA = ("kv_block_ids_per_seq", "gen_block_ids_per_seq")
MASKS = ("spec_decoding_packed_mask", "spec_decoding_position_offsets", "spec_decoding_generation_lengths")
MIXED = 3
"""Index of the mixed batch in ``life``."""


@pytest.fixture
def engine(tree):
    def make(era="settled", layout=LAYOUTS[0], *, metadata=KEYWORD, unguarded=False, **eras):
        return TensorrtLlmEngine(tree(era, layout, **eras), device="cpu", metadata=metadata, unguarded=unguarded)

    return make


def violated(scenario, engine, **options):
    verdict = verify(check(scenario), lambda s: run(engine, s), **options)
    return {v.invariant for v in verdict.violations}


@pytest.fixture(scope="module")
def lived(tree):
    """``lived(worker)`` is the trace of the worker's life in settled classes, with its sites."""

    @cache
    def live(worker):
        return run(TensorrtLlmEngine(tree(), device="cpu"), life(worker), record=[SEAMS, TORCH])

    return live


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("worker", DRIVEN)
def test_classes_that_leave_nothing_behind_hold_every_invariant(engine, worker):
    settled = engine()
    for scenario in lives(worker):
        assert violated(scenario, settled, relations=scenario == life(worker)) == set()


@pytest.mark.exhaustive(every=6, first=1)
@pytest.mark.parametrize("worker", DRIVEN)
def test_the_trace_is_the_same_in_the_layout_of_before(engine, worker, lived):
    assert run(engine(layout=LAYOUTS[1]), life(worker), record=[SEAMS, TORCH]) == lived(worker)


@pytest.mark.exhaustive(every=6, first=2)
@pytest.mark.parametrize("worker", DRIVEN)
def test_sites_are_the_same_in_the_first_run_of_a_process_and_in_later_ones(engine, worker, lived):
    """Else a fault that was planned for one run does not fire in the next."""
    linear_tables.cache_clear()
    first = run(engine(), life(worker), record=[SEAMS, TORCH])
    # Another run came before that one, if only the one above.
    later = lived(worker)
    assert [step.sites for step in first.steps] == [step.sites for step in later.steps]


@pytest.mark.exhaustive(every=3, first=2)
@pytest.mark.parametrize("worker", DRIVEN)
def test_metadata_by_position_gives_the_same_trace(engine, worker, lived):
    assert run(engine(metadata=POSITIONAL), life(worker), record=[SEAMS, TORCH]) == lived(worker)


@pytest.mark.parametrize(("metadata", "named"), [(KEYWORD, 8), (POSITIONAL, 0)])
def test_arguments_are_passed_as_asked_for(engine, metadata, named):
    session = engine(metadata=metadata).open(life("PARDWorker").config)
    seen = []
    session._model.spec_worker.register_forward_pre_hook(lambda *call: seen.append(call), with_kwargs=True)
    session.step(life("PARDWorker").steps[0])
    session.close()
    assert [(len(args), len(kwargs)) for _, args, kwargs in seen] == [(8 - named, named)]


@pytest.mark.exhaustive(every=3, first=1)
@pytest.mark.parametrize("worker", DRIVEN)
def test_with_one_cache_for_all_layers_the_trace_is_the_same_once_there_are_generations(tree, worker, lived):
    shared = TensorrtLlmEngine(tree("settled"), device="cpu", separate_draft_kv_cache=False)
    scenario = life(worker)
    session = shared.open(scenario.config, scenario.requests)
    step = session.step(scenario.steps[0])
    session.close()
    assert values(step) == values(lived(worker).steps[0])


@pytest.mark.exhaustive(every=3, first=2)
@pytest.mark.parametrize("worker", DRIVEN)
def test_the_trace_is_that_of_the_portable_engine_and_both_leave_the_process_as_it_was(engine, worker):
    scenario = life(worker)
    before = run(PortableEngine(), scenario)
    modules, attributes = dict(sys.modules), (dict(vars(torch)), dict(vars(torch.cuda)))
    real = run(engine(), scenario)
    assert dict(sys.modules) == modules
    assert (dict(vars(torch)), dict(vars(torch.cuda))) == attributes
    assert run(PortableEngine(), scenario) == before
    assert (real.engine, real.device) == ("tensorrt_llm", "cpu (emulated)")
    compared = real.steps, before.steps
    if WORKERS[worker].feeds_history or WORKERS[worker].keeps_context:
        # What dummies are drafted for depends on the slots that they were given.
        compared = [[step for step in steps if not step.phase.is_startup] for steps in compared]
    # Tables of flash MLA, and those of chains, are shown by the portable engine alone.
    own = FLASH_MLA if WORKERS[worker].tree else (*FLASH_MLA, *MASKS)
    assert [values(step, own) for step in compared[0]] == [values(step, own) for step in compared[1]]


def values(step, left_out=()):
    """A step's outcome and fields but for objects, by label or by name, and what the workers keep to themselves."""
    own = {"identity", "shared_with_eager", "worker_state", "spec_num_tokens", "num_capture_tokens", *left_out}
    own |= {"slot_ids", "spec_slots", "racing_copies"}
    substeps = [(s.key, s.phase, {k: v for k, v in s.fields.items() if k not in own}) for s in step.substeps]
    return step.outcome, step.fired, substeps


@pytest.mark.exhaustive(every=5, first=1)
@pytest.mark.parametrize(
    "worker", ["DraftTargetOneModelWorker", "PARDWorker", "MTPWorker", "DFlashWorker", "MTPEagleDynamicTreeWorker"]
)
def test_a_fault_at_any_seam_of_settled_classes_is_cleaned_up(engine, worker):
    settled, scenario = engine(), without_startup(life(worker))
    trace = run(settled, scenario, record=[SEAMS])
    sites = trace.steps[1].sites
    assert {"draft_model.forward", "attn_metadata.on_update", "worker.sample_draft_tokens"} <= set(sites)
    for site in sites:
        assert violated(failing(scenario, 1, site), settled, relations=False) == set(), site


def without_startup(scenario):
    served = tuple(step for step in scenario.steps if step.phase is Phase.EAGER)
    return replace(scenario, steps=served)


def test_every_torch_call_is_a_site(engine):
    trace = run(engine(), life("DraftTargetOneModelWorker"), record=[TORCH])
    sites = trace.steps[MIXED].sites
    assert sites["torch.clone"] >= 2
    assert sites["torch.argmax"] == 1 + KMAX
    fault = failing(life("DraftTargetOneModelWorker"), MIXED, "torch.stack")
    assert violated(fault, engine(), relations=False) == set()


@pytest.mark.exhaustive(every=3, first=1)
@pytest.mark.parametrize(("worker", "layout"), [(worker, LAYOUTS[i % 2]) for i, worker in enumerate(DRIVEN)])
def test_before_the_fix_a_tolerated_failure_fails_every_later_step(engine, worker, layout):
    old = engine("pre-fix", layout)
    scenario = failing(life(worker), MIXED, "draft_model.forward")
    verdict = verify(scenario, lambda s: run(old, s), relations=False)
    assert {"saved-state-empty", "steps-complete", "forward-not-overridden"} <= {
        v.invariant for v in verdict.violations
    }
    (first,) = [v for v in verdict.violations if v.invariant == "saved-state-empty" and v.substep == "failed"][:1]
    assert (first.step, first.actual) == (MIXED, ["_seq_lens", "_seq_lens_cuda"])
    assert verdict.trace.steps[MIXED + 1].find("failed")["exception"] == "AssertionError"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_the_fix_the_leak_is_gone_and_num_contexts_is_what_remains(engine, layout):
    fixed = engine("post-fix", layout)
    scenario = failing(life("MTPEagleWorker"), MIXED, "draft_model.forward", 2)
    verdict = verify(scenario, lambda s: run(fixed, s), relations=False)
    assert {v.invariant for v in verdict.violations} == {"restored-layout", "layout-equals-reference"}
    assert {v.field for v in verdict.violations} == {
        "num_contexts", "num_generations", "num_ctx_tokens", "host_request_types"
    }  # fmt: skip
    assert ("warning", "a forward failed while attention metadata was saved; restoring it") in (
        fixed.upstream.logger.records
    )


def test_after_the_fix_a_draft_length_of_0_leaves_a_hole_in_the_drafters_cache(engine):
    found = violated(varying("Eagle3OneModelWorker"), engine("post-fix"))
    assert {"substeps-in-order", "kv-content-equals-reference"} <= found


def test_after_the_fix_a_non_final_chunk_ends_with_a_token_that_is_not_the_prompts(engine):
    found = violated(chunked("DraftTargetOneModelWorker"), engine("post-fix"))
    assert {"inputs-equal-reference", "chunked-equals-one-shot"} <= found


def test_a_worker_that_the_guard_rejects_is_refused_or_driven_without_the_guard(engine, monkeypatch):
    mixed = {"era": "post-fix", "pard": "pre-fix"}
    with pytest.raises(UsageError, match="PARDWorker is rejected by the guard of its base"):
        engine(**mixed).open(Config(worker="PARDWorker", max_draft_len=1))
    monkeypatch.setenv("SPECFUZZ_TRTLLM_UNGUARDED", "1")
    unguarded = engine(**mixed, unguarded=None)
    verdict = verify(life("PARDWorker"), lambda s: run(unguarded, s), relations=False)
    assert {v.invariant for v in verdict.violations} == {"forward-not-overridden"}
    assert verdict.trace.classes == {
        "forward_defined_in": ["PARDWorker", "SpecWorkerBase"],
        "guard_off": True,
        "supplements": [],
    }


def test_a_worker_that_ignores_the_runtime_draft_length_refuses_a_shorter_one(engine):
    session = engine("pre-fix").open(Config(worker="PARDWorker", max_draft_len=2))
    with pytest.raises(UsageError, match=r"steps\[0\].draft_len: PARDWorker .* write 2"):
        session.step(Step(draft_len=1, contexts=()))
    session.close()


def test_a_step_that_could_not_come_next_is_refused_as_by_the_portable_engine(engine):
    session = engine().open(Config(worker="PARDWorker", max_draft_len=2))
    with pytest.raises(ScenarioError, match="the batch is empty"):
        session.step(Step(draft_len=2))
    session.close()


def test_a_worker_that_no_file_defines_or_whose_module_fails_is_refused(tree, tmp_path):
    from tests.fixtures.tensorrt_llm_tree import build

    folder = build(tmp_path) / "tensorrt_llm/_torch/speculative"
    (folder / "eagle3.py").unlink()
    (folder / "pard.py").write_text("class PARDWorker:\n    nonsense\n")
    engine = TensorrtLlmEngine(tmp_path)
    with pytest.raises(UsageError, match="no file of .* defines MTPEagleWorker"):
        engine.open(Config(worker="MTPEagleWorker", max_draft_len=1))
    with pytest.raises(UsageError, match="the module of PARDWorker does not load .NameError"):
        engine.open(Config(worker="PARDWorker", max_draft_len=1))


def test_a_worker_that_the_suite_has_no_driver_for_is_refused(engine):
    with pytest.raises(UsageError, match=r"config.worker: the suite has no driver for SAWorker; write one of "):
        engine().open(Config(worker="SAWorker", max_draft_len=1))
    assert fuzz.engines.workers("tensorrt_llm") == DRIVEN


@pytest.mark.parametrize(
    "variant", [{"force_num_accepted_tokens": 1.0}, {"draft_vocab_map": True}, {"sa_threshold": 1}]
)
def test_a_variant_of_acceptance_is_refused_and_not_drawn(engine, variant):
    with pytest.raises(UsageError, match=f"config.{next(iter(variant))}: .* leave it out"):
        engine().open(Config(worker="Eagle3OneModelWorker", max_draft_len=1, **variant))
    assert not hasattr(engine(), "variants")


def test_caches_that_it_has_not_are_refused(engine):
    with pytest.raises(UsageError, match="config.host_offload: .* one plain KV cache; leave it out"):
        engine().open(Config(worker="MTPEagleWorker", max_draft_len=1, host_offload=True))
    with pytest.raises(UsageError, match="config.stall_copies: .*; leave it out"):
        engine().open(Config(worker="MTPEagleWorker", max_draft_len=1, stall_copies=True))


def test_an_attention_backend_of_which_upstream_has_no_python_is_refused(engine):
    with pytest.raises(UsageError, match="config.attention_backend: .* write 'TRTLLM'"):
        engine().open(Config(worker="MTPEagleWorker", max_draft_len=1, attention_backend="DSA"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "tpu"}, "write 'cpu' or 'cuda'"),
        ({"metadata": "keywords"}, "did you mean 'keyword'"),
    ],
)
def test_options_that_are_not_known_are_refused(tree, options, text):
    with pytest.raises(UsageError, match=text):
        TensorrtLlmEngine(tree(), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none(tree):
    with pytest.raises(UsageError, match="finds no CUDA device"):
        TensorrtLlmEngine(tree(), device="cuda")


def test_without_observation_nothing_is_read(engine):
    trace = run(engine(), life("PARDWorker"), observe=False)
    assert [step.outcome for step in trace.steps] == ["ok"] * 7
    assert all(step.substeps == () for step in trace.steps)
