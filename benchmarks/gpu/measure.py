"""What measurements share: time of the device, what it can do at best, and records with the command that made them."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

RESULTS: Final = Path(__file__).parents[1] / "results"


def seconds_on_device(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of the device for ``work``, which is run twice before it is measured."""
    times = []
    for i in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per second, read and written, of a copy that is much larger than the cache."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_on_device(lambda: target.copy_(source), 10)


def seconds_per_launch() -> float:
    """Seconds of one of a thousand small kernels that depend on each other, in a graph."""
    value = torch.zeros(64, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    value.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            value.add_(1)
    return seconds_on_device(graph.replay, 20) / 1000


def count_launches(work: Callable[[], Any]) -> int:
    """Kernels and copies that ``work`` makes the device run."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def seconds_of(step: Callable[[], Any]) -> float:
    """Wall seconds of a step, which ends when the device has done it."""
    _wait()
    begin = time.perf_counter()
    step()
    _wait()
    return time.perf_counter() - begin


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def record(name: str, values: dict[str, Any], output: Path | None) -> None:
    """Write ``name``.json to ``output``, or to ``benchmarks/results``, and print it."""
    where = {
        "command": " ".join(["python", "-m", f"benchmarks.gpu.{name}", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    text = json.dumps({**where, **values}, indent=2)
    folder = output or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gpu_{name}.json").write_text(text + "\n")
    print(text)
