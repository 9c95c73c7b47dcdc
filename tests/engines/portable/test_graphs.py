"""Emulated graphs: what a replay does and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engines.portable._utils import is_current_stream_capturing
from engines.portable.graphs import CpuGraph, capture, unrecorded
from engines.portable.pyexecutor import cuda_graph_runner as graph_runner
from engines.tracer import Rows
from engines.unseen import Kernels, unseen
from scenarios import Phase
from tests.engines.portable.scripts import go, mixed
from tests.engines.portable.support import CPU, ints


def test_a_replay_reads_and_writes_the_tensors_of_the_capture() -> None:
    given, kept = ints([1, 2, 3, 4]), ints([0, 0, 0, 0])

    def forward() -> dict[str, Any]:
        doubled = given.view(2, 2).t().reshape(-1) * 2  # views, a copy, a result
        kept[1:3].add_(doubled[1:3])  # in place, through views
        total = torch.zeros(2, dtype=torch.int32)  # a fresh tensor, then written
        total[0] = doubled.sum()
        torch.cumsum(doubled, 0, dtype=torch.int32, out=scratch)
        values, indices = doubled.cummax(0)  # two results
        return {"doubled": doubled, "total": total, "values": values, "indices": indices}

    scratch = ints([0, 0, 0, 0])
    graph, outputs = capture(forward, CPU)
    assert outputs["doubled"].tolist() == [2, 6, 4, 8]
    given.copy_(ints([10, 0, 5, 1]))
    kept.zero_()
    graph.replay()
    assert outputs["doubled"].tolist() == [20, 10, 0, 2]
    assert outputs["total"].tolist() == [32, 0]
    assert outputs["values"].tolist() == [20] * 4
    assert outputs["indices"].tolist() == [0] * 4
    assert scratch.tolist() == [20, 30, 30, 32]
    assert kept.tolist() == [0, 10, 0, 0]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.enable_grad])
def test_reshapes_that_copy_are_run_again(context: Any) -> None:
    given = ints([[1, 2], [3, 4]])
    with context():
        graph, flat = capture(lambda: given.t().reshape(-1).to(torch.int64).contiguous(), CPU)
        given.mul_(10)
        graph.replay()
        assert flat.tolist() == [10, 30, 20, 40]


def test_host_values_are_those_of_the_capture() -> None:
    given, calls = ints([1, 2]), []

    def forward() -> Any:
        calls.append(given.tolist())
        return given + int(given[0])

    graph, result = capture(forward, CPU)
    given.copy_(ints([5, 6]))
    graph.replay()
    assert calls == [[1, 2]]
    assert result.tolist() == [6, 7]


def test_a_replay_is_out_of_sight_of_function_modes() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    given = ints([1])
    graph, result = capture(lambda: given + 1, CPU)
    with Watch():
        graph.replay()
    assert not seen
    assert result.tolist() == [2]


def test_capturing_is_announced_and_ends_with_a_failure() -> None:
    states = []

    def forward() -> None:
        states.append(is_current_stream_capturing())
        raise ValueError

    with pytest.raises(ValueError):
        capture(forward, CPU)
    assert states == [True]
    assert not is_current_stream_capturing()
    assert not CpuGraph.recording


def test_a_graph_that_nobody_replays_is_not_recorded() -> None:
    given = ints([1])
    graph, result = capture(lambda: given + 1, CPU, replayable=False)
    assert result.tolist() == [2]
    with pytest.raises(AssertionError, match="captured as one that nobody replays"):
        graph.replay()


@pytest.mark.parametrize("replayed", [True, False])
def test_a_scenario_is_known_before_it_runs(replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    monkeypatch.setattr(
        graph_runner, "capture", lambda *args, replayable: (recorded.append(replayable), capture(*args))[1]
    )
    case = mixed("MTPEagleWorker", 1, replay=True)
    steps = case.steps if replayed else tuple(step for step in case.steps if step.phase is not Phase.REPLAY)
    case = replace(case, steps=steps)
    assert any(step.phase is Phase.CAPTURE for step in case.steps)
    go(case)
    assert recorded
    assert set(recorded) == {replayed}


def test_a_graph_that_no_step_replays_is_not_recorded_beside_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = mixed("MTPEagleWorker", 1, replay=True)
    (replay,) = {len(step.rows) for step in case.steps if step.phase is Phase.REPLAY}
    larger = next(step for step in case.steps if step.phase is Phase.CAPTURE)
    larger = replace(larger, generations=(*larger.generations, larger.generations[-1]))
    recorded = []
    monkeypatch.setattr(
        graph_runner, "capture", lambda *args, replayable: (recorded.append(replayable), capture(*args))[1]
    )
    go(replace(case, steps=(larger, *case.steps)))
    assert len(larger.rows) == replay + 1
    assert recorded == [False, True]


def test_what_a_listener_reads_is_no_part_of_a_graph() -> None:
    given, seen = ints([1]), []
    listen = unrecorded(lambda tensor: seen.append((tensor + 1).tolist()))
    assert unrecorded(None) is None
    assert listen is not None

    def forward() -> Any:
        listen(given)
        return given + 2

    graph, result = capture(forward, CPU)
    assert isinstance(graph, CpuGraph)
    assert seen == [[2]]
    assert len(graph._calls) == 1
    given.fill_(5)
    graph.replay()
    assert (seen, result.tolist()) == ([[2]], [7])


def test_a_kernel_of_the_model_is_one_operation() -> None:
    given, calls = ints([1, 2]), []

    @unseen
    def inner(value: torch.Tensor) -> torch.Tensor:
        return value + 1

    @unseen
    def kernel(value: torch.Tensor) -> tuple[torch.Tensor, Rows]:
        calls.append(value.tolist())
        return inner(value), Rows(value * 2, value * 3)

    def forward() -> Any:
        first, rows = kernel(given * 10)
        return first, rows.sequence, rows.index + 1

    graph, results = capture(forward, CPU)
    assert isinstance(graph, CpuGraph)
    assert len(graph._calls) == 3
    given.fill_(3)
    graph.replay()
    assert calls == [[10, 20], [30, 30]]
    assert [result.tolist() for result in results] == [[31, 31], [60, 60], [91, 91]]
    assert Kernels.record is None


def test_a_kernel_that_fails_ends_the_capture() -> None:
    @unseen
    def kernel() -> None:
        raise ValueError

    def forward() -> None:
        with pytest.raises(ValueError):
            kernel()
        assert Kernels.record is not None
        kernel()

    with pytest.raises(ValueError):
        capture(forward, CPU)
    assert Kernels.record is None
