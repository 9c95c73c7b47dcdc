"""Comparing on the device, where the device is the CPU and graphs are emulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings

import reference
from benchmarks.gpu.serving import most_dimensions, serving
from engines.portable import Mismatches, PortableEngine
from engines.portable.attention.backends.trtllm import DRAFT_LAYER
from engines.portable.device_checks import DeviceChecks
from engines.portable.device_values import laid_out
from engines.portable.mismatches import ANYTHING, Region
from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from engines.portable.pyexecutor.py_executor import PyExecutor
from fuzz.on_device import DeviceHunt
from museum import BUGS, seeded
from scenarios import BACKENDS, WORKERS, Config, Context, Generation, Phase, Request, Scenario, Step, check
from scenarios.acceptance import VARIANTS
from scenarios.backends import runs_on
from strategies import scenarios
from tests.museum.scenario_of import scenario_of
from tests.wrong_inside import ROW, WORKER, wrong_inside

STALE = {
    "TRT-63/Eagle3OneModelWorker/replay": "draft[1] (run 0) input_ids",
    "TRT-85/MTPWorker/slots": "draft[0] (run 0) input_ids",
    "TRT-88/PARDWorker": "verified (run 0) kv_lens_cuda",
    "TRT-64/PARDWorker": "updated (run 0) draft_indexer_kv",
    "TRT-65/MTPWorker/block-offsets": "updated (run 0) draft_layers_kv",
    "TRT-95/Eagle3OneModelDynamicTreeWorker": "updated (run 0) target_kv[8]",
    "TRT-85/Eagle3OneModelDynamicTreeWorker/slots": "prepared (run 0) spec_decoding_packed_mask",
    "TRT-150/Eagle3OneModelWorker/captured": "verified (run 0) kv_lens_cuda",
    "TRT-30/Eagle3OneModelWorker": "entered (run 0) position_ids",
    "TRT-150/Eagle3OneModelWorker/own-cache": "draft[1] (run 0) input_ids",
    "TRT-57/Eagle3OneModelWorker/captured": "restored (run 0) ssm_states",
    "TRT-57/SAWorker": "updated (run 0) recurrent_states",
    "TRT-57/MTPWorker/written": "restored (run 0) sentinel_state",
    "TRT-97/DraftTargetOneModelWorker": "restored (run 0) rejection_rows",
    "TRT-10/Eagle3OneModelWorker/padding": "verified (run 0) draft_probs",
    "TRT-130/MTPEagleWorker/stale": "entered (run 0) matcher_rows",
    "TRT-130/PARDWorker": "restored (run 0) matcher_rows",
    "TRT-88/Eagle3OneModelWorker/widths": "verified (run 0) num_accepted_tokens",
    "SGL-11/Eagle3OneModelWorker": "updated (run 0) draft_kv",
    "TRT-80/DraftTargetOneModelWorker/shard": "draft[2] (run 0) input_ids",
}


def found(scenario: Scenario) -> Any:
    hunt = DeviceHunt(PortableEngine())
    return hunt.run(scenario) or hunt.read()


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(("worker", "backend"), [(w, b) for b in ("TRTLLM", "DSA") for w in WORKERS if runs_on(w, b)])
def test_the_clean_engine_has_no_mismatch(worker: str, backend: str) -> None:
    assert found(serving(worker, batch=3, draft_len=3, steps=3, backend=backend)) is None


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("worker", WORKERS)
def test_nor_has_it_in_all_dimensions_that_a_worker_has(worker: str) -> None:
    for backend in ("TRTLLM", "DSA") if WORKERS[worker].sparse else ("TRTLLM",):
        dimensions = most_dimensions(worker, backend)
        assert found(serving(worker, batch=3, draft_len=3, steps=3, backend=backend, **dimensions)) is None


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(scenarios(backends=BACKENDS, variants=VARIANTS, max_steps=4))
def test_nor_in_drawn_scenarios(scenario: Scenario) -> None:
    assert found(scenario) is None


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(("bug", "place"), STALE.items())
def test_a_defect_is_found_where_it_is_read_first(bug: str, place: str) -> None:
    scenario = scenario_of(BUGS[bug])
    with seeded(bug):
        finding = found(scenario)
    assert finding.mismatch.startswith(place)
    assert finding.violations[0].message in str(finding)


def test_a_value_that_is_wrong_inside_a_graph_only() -> None:
    scenario = serving(WORKER, batch=4, draft_len=3, steps=3)
    with wrong_inside():
        finding = found(scenario)
    assert finding.step == 2
    assert scenario.steps[2].phase is Phase.REPLAY
    assert finding.mismatch == (
        f"draft[1] (run 0) kv_lens_cuda[{ROW}] is not what it should be, and 2 more values that differ"
    )
    # Traces know nothing of a replay; an emulated capture shows it, a real one does not.
    assert {violation.step for violation in finding.violations} == {0}


def test_outputs_that_are_not_those_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = CUDAGraphRunner.replay

    def of_another(self: CUDAGraphRunner, *args: Any) -> dict[str, torch.Tensor]:
        outputs = replay(self, *args)
        return {**outputs, "next_draft_tokens": outputs["next_draft_tokens"] + 1}

    monkeypatch.setattr(CUDAGraphRunner, "replay", of_another)
    finding = found(serving(WORKER, batch=2, draft_len=2, steps=1))
    assert (finding.step, finding.mismatch[:40]) == (2, "restored (run 0) next_draft_tokens[0][0]")


@pytest.mark.parametrize("bug", ["TRT-01/Eagle3OneModelWorker", "TRT-35/Eagle3OneModelWorker/in-flight"])
def test_a_step_that_ends_otherwise_than_it_should(bug: str) -> None:
    with seeded(bug):
        finding = found(scenario_of(BUGS[bug]))
    assert finding.mismatch == "failed (run 0) outcome is not what it should be"


def test_the_last_step_in_flight_is_processed() -> None:
    scenario = scenario_of(BUGS["TRT-35/SAWorker/again"])

    def fail(*args: Any) -> None:
        raise RuntimeError("nobody expects this")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PyExecutor, "_terminate_requests", fail)
        finding = found(replace(scenario, steps=scenario.steps[1:2]))
    assert (finding.step, finding.mismatch) == (0, "failed (run 0) outcome is not what it should be")


def test_copies_that_run_late() -> None:
    bug = "TRT-90/SAWorker"
    scenario = scenario_of(BUGS[bug])
    late = replace(scenario, config=replace(scenario.config, stall_copies=True))
    assert found(late) is None
    with seeded(bug):
        assert found(scenario) is None, "a CPU copies at once"
        assert found(late).mismatch.startswith("updated (run 0) target_kv[0] ")


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_that_are_known_and_that_nobody_has(overlap: bool) -> None:
    config = Config(worker=WORKER, max_draft_len=2, tokens_per_block=2, enable_block_reuse=True, overlap=overlap)
    rows = {"draft_len": 2, "generations": (Generation(request=1),)}
    scenario = Scenario(
        config=config,
        requests=(Request(id=0, prompt_len=6), Request(id=1, prompt_len=3)),
        steps=(
            Step(draft_len=2, contexts=(Context(request=0, chunk=6), Context(request=1, chunk=3)), finish=(0,)),
            *(Step(**rows) for _ in range(3)),
        ),
    )
    said, mismatches = iter(reference.trace(check(scenario)).steps), Mismatches(torch.device("cpu"))
    opened = PortableEngine().open_checked(config, scenario.requests, lambda _: next(said), mismatches, caches=True)
    manager = opened._executor.draft_kv_cache_manager or opened._executor.kv_cache_manager
    for i, step in enumerate(scenario.steps):
        mismatches.begin_step(i)
        opened.step(step)
        if i == 2:
            assert mismatches.read() is None
            mismatches.begin_step(i)
            manager.get_buffers(DRAFT_LAYER)[manager.reusable_blocks.reclaim_order()[0], 1] += 1
    found = mismatches.read()
    assert found is not None
    assert (found.field, found.count) == ("known_draft_kv", 1)


def test_a_replay_has_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[int] = []
    upload = DeviceChecks._upload

    def counted(self: DeviceChecks, flat: list[int]) -> torch.Tensor:
        uploads.append(len(flat))
        return upload(self, flat)

    monkeypatch.setattr(DeviceChecks, "_upload", counted)
    scenario = serving(WORKER, batch=2, draft_len=2, steps=4)
    said = iter(reference.trace(scenario, in_graphs=True).steps)
    mismatches = Mismatches(torch.device("cpu"))
    opened = PortableEngine().open_checked(scenario.config, scenario.requests, lambda _: next(said), mismatches)
    taken = []
    for step in scenario.steps:
        mismatches.begin_step(step)
        before = len(uploads)
        opened.step(step)
        taken.append(len(uploads) - before)
    assert taken[2:] == [1, 1, 1, 1]
    assert uploads[-1] == uploads[-4] > opened._observer.values_inside() > 0
    assert mismatches.read() is None


def test_one_reading_serves_many_steps() -> None:
    counted: list[int] = []
    hunt = DeviceHunt(PortableEngine(), read_every=8, after_step=counted.append)
    for _ in range(4):
        assert hunt.run(serving(WORKER, batch=1, draft_len=1, steps=2)) is None
    assert (hunt.scenarios, hunt.steps, hunt.readings) == (4, 16, 2)
    assert counted == list(range(1, 17))


@pytest.mark.parametrize(
    ("field", "value", "shape", "flat"),
    [
        ("kv_lens_cuda", [3, 4], (2,), [3, 4]),
        ("kv_lens_cuda", [3, 4], (3,), None),
        ("new_tokens", [[3], [4, 5]], (2, 2), [3, ANYTHING, 4, 5]),
        ("new_tokens", [[3, 4, 5]], (1, 2), None),
        ("force_accept_counter", 7, (1,), [7]),
        ("ssm_states", [None, 5], (2,), [ANYTHING, 5]),
        ("draft_probs", [None, [0, 1]], (2, 2), [ANYTHING] * 2 + [0, 1]),
        ("topk_indices_buffer", [None, [0, 1]], (2, 3), [ANYTHING] * 3 + [0, 1, -1]),
        ("spec_decoding_packed_mask", [[[0], [0, 31, 33]]], (1, 2, 2), [1, 0, 1 - 2**31, 2]),
    ],
)
def test_a_value_of_the_trace_is_laid_out_as_the_tensor_is(
    field: str, value: Any, shape: Sequence[int], flat: list[int] | None
) -> None:
    assert laid_out(field, value, shape) == flat


def test_the_first_place_is_that_of_the_first_step() -> None:
    mismatches = Mismatches(torch.device("cpu"))
    for step, actual in (("one", [1, 2, 3, 4]), ("two", [0, 2, 3, 9]), ("three", [9, 9, 9, 9])):
        mismatches.begin_step(step)
        mismatches.add_regions([Region(10, (1,), "entered", 0, "a"), Region(11, (0, 2), "entered", 0, "none")])
        mismatches.add_regions([Region(11, (3, 1), "restored", 1, "b")])
        mismatches.compare(torch.tensor(actual), torch.tensor([ANYTHING, 2, 3, 4]), 10)
    found = mismatches.read()
    assert found is not None
    assert (found.step, found.substep, found.run, found.field, found.index) == ("two", "restored", 1, "b", (2, 0))
    assert found.count == 4
    assert mismatches.read() is None


def test_another_form_than_expected_is_a_mismatch_that_the_host_sees() -> None:
    scenario = scenario_of(BUGS["TRT-83/PARDWorker"])
    with seeded("TRT-83/PARDWorker"):
        assert str(found(scenario)).startswith("steps[3] prepared (run 0) _seq_lens_cuda is not what it should be: ")
