"""Nothing waits for the device where the host is to run ahead of it, and no operation mixes tensors of the two.

There is no device here: what the engine makes there is followed through all operations, by the ``device`` that it
passes, and an operation that would have to read it is noted. That holds for what prepares a replay and for what is
captured; an eager step may wait. ``gpu_tests/test_races.py`` sees the same on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from torch.overrides import TorchFunctionMode

from engines.portable.graphs import CpuGraph
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from gpu_tests.driving import CASES, IDS, life, opened
from museum import BUGS, seeded
from tests.museum.scenario_of import scenario_of

FROZEN = [bug.id for bug in BUGS.values() if bug.kind == "K10"]
READS = [bug for bug in FROZEN if bug.startswith("TRT-160/")]
"""These read the device in what is captured. A device ends the capture; here they show that it would be noticed."""

READING = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu", "unique", "equal"}
READING |= {"masked_select", "argwhere", "numpy"}
COPYING = {"copy_", "to", "pin_memory", "__get__", "__set__"}
"""These take tensors of both, or none."""


def tensors(values: Any) -> Iterator[Any]:
    """All tensors among arguments or results."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


def is_there(tensor: Any) -> bool:
    """Whether a tensor stands for one on the device: all but what was made without one, and what comes of that."""
    return not getattr(tensor, "is_here", False)


class Device(TorchFunctionMode):
    """Follows what is on the device, and notes what waits for it while the host may not."""

    def __init__(self) -> None:
        super().__init__()
        self.replaying = False
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        given = [*tensors(args), *tensors(list(kwargs.values()))]
        there = any(map(is_there, given))
        if (self.replaying or CpuGraph.recording) and not isinstance(func, torch._ops.OpOverload):
            self._look(name, given, args, kwargs)
        result = func(*args, **kwargs)
        if name == "to" and any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
            return result.clone() if result is args[0] else result
        if name == "cpu" or not (there or isinstance(kwargs.get("device"), torch.device)):
            for tensor in tensors(result):
                tensor.is_here = True
        return result

    def _look(self, name: str, given: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        there = [tensor for tensor in given if is_there(tensor)]
        waits = bool(there) and name in READING
        if name in ("__getitem__", "__setitem__"):
            waits = any(is_there(index) and index.dtype == torch.bool for index in tensors(args[1]))
        if name == "repeat_interleave":
            waits = any(map(is_there, tensors(args[1:]))) and "output_size" not in kwargs
        if name == "copy_" and is_there(args[0]) != is_there(args[1]):
            waits = not kwargs.get("non_blocking", False)
        if waits:
            self.found.append(f"{name} waits")
        if there and name not in COPYING and any(not is_there(tensor) and tensor.dim() for tensor in given):
            self.found.append(f"{name} of both")


def waits(scenario: Any) -> list[str]:
    """What waits where it may not."""
    device, forward = Device(), PyTorchModelEngine.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        device.replaying = kwargs["use_cuda_graph"]
        try:
            return forward(self, *args, **kwargs)
        finally:
            device.replaying = False

    with mock.patch.object(PyTorchModelEngine, "forward", noted), device:
        with opened(scenario, "cpu", observe=False) as session:
            for step in scenario.steps:
                session.step(step)
    return device.found


@pytest.mark.exhaustive(every=12)
@pytest.mark.parametrize(("worker", "name"), CASES, ids=IDS)
def test_a_replay_and_a_capture_wait_for_nothing(worker: str, name: str) -> None:
    assert waits(life(worker, name)) == []


@pytest.mark.exhaustive(every=12)
@pytest.mark.parametrize("bug", [bug for bug in FROZEN if bug not in READS])
def test_nor_do_defects_that_a_device_is_to_repeat(bug: str) -> None:
    with seeded(bug):
        assert waits(scenario_of(BUGS[bug])) == []


@pytest.mark.parametrize("bug", READS)
def test_reading_in_a_capture_is_noticed(bug: str) -> None:
    with seeded(bug):
        assert set(waits(scenario_of(BUGS[bug]))) == {"tolist waits", "copy_ waits"}


def test_so_are_operations_on_tensors_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("museum.trt_57.baked", lambda values, device: torch.tensor(values))
    with seeded("TRT-57/SAWorker/captured"):
        found = waits(scenario_of(BUGS["TRT-57/SAWorker/captured"]))
    assert set(found) == {"index_select of both", "index_copy_ of both", "where of both"}
