"""What `gpu_tests` is made of, on emulated graphs: its scenarios are valid, and its modules can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the GPU tests drive the portable engine")

from engines.portable import PortableEngine
from gpu_tests import (
    driving,
    hunting,
    ranks,
    test_capture_failures,
    test_graphs,
    test_museum,
    test_out_of_memory,
    test_races,
)
from museum import BUGS, seeded
from scenarios import BACKENDS, WORKERS, Fault, FaultKind

EAGLE3 = "Eagle3OneModelWorker"
PARTS = {
    *("separate", "guided", "enhancer", "reuse", "recurrent", "rejection", "tensor-parallel", "overlap"),
    *("overlap-separate", "overlap-guided", "overlap-enhancer", "overlap-reuse", "overlap-recurrent"),
    *("overlap-rejection", "overlap-DSA", "overlap-DEEPSEEK_V4", "overlap-FLASHINFER"),
    *("ragged", "ragged-DSA", "overlap-ragged", "overlap-ragged-DSA"),
}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (driving, test_graphs):
        monkeypatch.setattr(module, "DEVICE", "cpu")


def test_every_worker_and_backend_is_driven() -> None:
    assert {worker for worker, _ in driving.CASES} == set(WORKERS)
    with_graphs = {name for name, backend in BACKENDS.items() if not backend.one_page}
    assert {name for _, name in driving.CASES} == with_graphs | PARTS
    assert sum(name == "DSA" for _, name in driving.CASES) == sum(traits.sparse for traits in WORKERS.values())


def test_all_scenarios_are_valid() -> None:
    """Making one checks it."""
    for worker, name in driving.CASES:
        assert driving.overriding(driving.life(worker, name)).steps
        assert test_graphs.growing(worker, name).steps
    for worker in WORKERS:
        assert test_out_of_memory.story(worker).steps
        assert [ranks.scenario_of(worker, rank).config.attention_dp_rank for rank in (0, 1)] == [0, 1]
        assert ranks.scenario_of(worker + ranks.OVERLAP, 1).config.overlap
    assert all(test_museum.around_a_graph(bug).steps for bug in test_museum.AROUND_GRAPHS)


def test_defects_of_graphs_copies_and_what_both_repeat_are_hunted_on_a_device() -> None:
    entries = {bug.id.split("/")[0] for bug in test_museum.HERE}
    assert {"TRT-01", "TRT-04", "TRT-12"} <= entries
    assert {bug.id for bug in BUGS.values() if bug.kind in ("K10", "K11")} <= {bug.id for bug in test_museum.HERE}
    assert "TRT-17" not in entries


@pytest.mark.parametrize(
    "holds",
    [
        test_graphs.test_eager_capture_and_replay_of_one_batch_are_equal,
        test_graphs.test_replays_are_their_eager_twins,
        test_graphs.test_every_host_value_is_another_in_the_replay_and_is_followed,
        test_graphs.test_poisoned_buffers_change_nothing,
    ],
)
def test_graphs_hold(holds: Callable[[str, str], None]) -> None:
    holds(EAGLE3, "separate")
    holds("MTPEagleWorker", "overlap-recurrent")
    holds("DraftTargetOneModelWorker", "overlap-ragged-DSA")


def test_a_step_in_flight_is_part_of_what_a_run_ends_with() -> None:
    scenario = driving.life("PARDWorker", "overlap")
    right = test_races.live(scenario, "cpu")
    assert right.differ_from(test_races.live(scenario, "cpu")) == []
    with seeded("TRT-150/PARDWorker/captured"):
        assert "step 7" in test_races.live(scenario, "cpu").differ_from(right)


@pytest.mark.parametrize("bug", ["VLL-04/SAWorker", "TRT-80/PARDWorker/shard"])
def test_a_defect_is_hunted_with_and_without_it(bug: str) -> None:
    assert hunting.hunt(bug, with_bug=False)["noticed"] == []
    assert set(BUGS[bug].caught_by) & {*hunting.hunt(bug, with_bug=True)["noticed"]}


@pytest.mark.exhaustive
def test_growth_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    test_graphs.test_what_a_graph_knows_outlives_growth("PARDWorker", "TRTLLM", monkeypatch)
    test_graphs.test_a_buffer_that_gives_way_to_a_larger_one_is_seen("SGL-10/PARDWorker", monkeypatch)
    test_graphs.test_poison_is_seen_where_a_copy_is_left_out(monkeypatch)


def test_a_capture_that_fails_leaves_no_graph_and_no_metadata() -> None:
    scenario = test_capture_failures.story(EAGLE3, "TRTLLM")
    first = replace(scenario.steps[0], fault=Fault(site="draft_model.forward", occurrence=2, kind=FaultKind.ERROR))
    session = PortableEngine().open(scenario.config, scenario.requests)
    assert session.step(first).outcome == "fatal"
    assert driving.runner(session).graphs == {}
    session.close()
    right = driving.drive(scenario)
    test_capture_failures.assert_recovers(scenario, right, "draft_model.forward", 2)
