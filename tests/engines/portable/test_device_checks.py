"""Comparing on the device, where the device is the CPU and graphs are emulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings

import reference
from benchmarks.gpu.serving import serving
from engines.portable import Mismatches, PortableEngine
from engines.portable.device_checks import DeviceChecks
from engines.portable.device_values import laid_out
from engines.portable.mismatches import ANYTHING, Region
from fuzz.on_device import DeviceHunt
from museum import BUGS, seeded
from scenarios import BACKENDS, WORKERS, Phase, Scenario
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
}


def found(scenario: Scenario) -> Any:
    hunt = DeviceHunt(PortableEngine())
    return hunt.run(scenario) or hunt.read()


@pytest.mark.parametrize("backend", ["TRTLLM", "DSA"])
@pytest.mark.parametrize("worker", WORKERS)
def test_the_clean_engine_has_no_mismatch(worker: str, backend: str) -> None:
    if not BACKENDS[backend].sparse or WORKERS[worker].sparse:
        assert found(serving(worker, batch=3, draft_len=3, steps=3, backend=backend)) is None


@settings(max_examples=25)
@given(scenarios(backends=BACKENDS, max_steps=4))
def test_nor_in_drawn_scenarios(scenario: Scenario) -> None:
    assert found(scenario) is None


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


def test_a_step_that_ends_otherwise_than_it_should() -> None:
    with seeded("TRT-01/Eagle3OneModelWorker"):
        finding = found(scenario_of(BUGS["TRT-01/Eagle3OneModelWorker"]))
    assert finding.mismatch == "failed (run 0) outcome is not what it should be"


def test_replays_of_one_form_have_one_upload_each(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert taken[2:] == [4, 1, 1, 1]
    assert sum(uploads[-7:-3]) == uploads[-1], "each says the same"
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
        mismatches.add_regions([Region(10, (1,), "entered", 0, "a"), Region(11, (3, 1), "restored", 1, "b")])
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
