"""Scenarios per second: verified on the device, and with full traces there and on the CPU.

Drawn scenarios are small, and on a device mostly wait for launches; a served batch is larger.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.drawn import drawn
from benchmarks.gpu.measure import record
from benchmarks.gpu.serving import serving
from engines.base import run
from engines.portable import PortableEngine
from fuzz.on_device import DeviceHunt
from invariants import verify
from scenarios import Scenario


def traced(engine: PortableEngine, scenarios: list[Scenario]) -> None:
    """Full traces, all invariants over one run."""
    for scenario in scenarios:
        assert not verify(scenario, lambda s: run(engine, s), relations=False).violations


def on_device(engine: PortableEngine, scenarios: list[Scenario]) -> None:
    """Compared where the tensors are."""
    hunt = DeviceHunt(engine)
    for scenario in scenarios:
        assert hunt.run(scenario) is None
    assert hunt.read() is None


def per_second(work: Callable[[PortableEngine, list[Scenario]], None], device: str, scenarios: list[Scenario]) -> float:
    """Scenarios that are done in a second; the first one is run beforehand."""
    engine = PortableEngine(device)
    work(engine, scenarios[:1])
    begin = time.perf_counter()
    work(engine, scenarios)
    return len(scenarios) / (time.perf_counter() - begin)


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.throughput", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--output", type=Path, help="folder of the record, instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        "drawn": drawn(1, options.count),
        "served, batch 64": [
            serving("Eagle3OneModelWorker", batch=64, draft_len=4, steps=20, seed=seed) for seed in range(3)
        ],
    }
    values: dict[str, Any] = {}
    for name, scenarios in kinds.items():
        values[name] = {
            "scenarios": len(scenarios),
            "steps": sum(len(scenario.steps) for scenario in scenarios),
            "scenarios_per_second": {
                "cuda, on the device": per_second(on_device, "cuda", scenarios),
                "cuda, traced": per_second(traced, "cuda", scenarios),
                "cpu, on the device": per_second(on_device, "cpu", scenarios),
                "cpu, traced": per_second(traced, "cpu", scenarios),
            },
        }
    record("throughput", values, options.output)


if __name__ == "__main__":
    main()
