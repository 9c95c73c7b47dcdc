"""A long run of scenarios that are verified on the device: no finding, and no growth of the device's memory.

Scenarios are drawn as a search draws them; between them each worker serves batches by graph replays, with dimensions
that are drawn too. Several processes share the devices, each with scenarios of its own. A process ends with the
scenarios that it began with, so that the device memory of its first and of its last thousand steps can be compared: the
peak, and what is left between sessions.

The run has passed if it has done the steps that it was asked for, in every dimension some of them, without a finding
and without growth. Steps are counted once they have ended as they should; what differs on the device is asked before
the record is written.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from benchmarks.gpu.drawn import drawn
from benchmarks.gpu.measure import record
from benchmarks.gpu.serving import drawn_dimensions, serving
from engines.portable import PortableEngine
from fuzz.on_device import DeviceHunt
from scenarios import WORKERS, Config, Phase, Scenario
from scenarios.acceptance import VARIANTS

ENDS: Final = 1000
"""Steps at either end whose memory is compared, in each process."""
DIMENSIONS: Final = VARIANTS
"""Fields of configurations that all have their part in it."""
PLAIN: Final = Config(worker="Eagle3OneModelWorker", max_draft_len=1)


@dataclass
class Memory:
    """Bytes of the device that tensors take: at most, and between two sessions at most.

    A session is a cycle of objects, so its tensors are there until Python collects it.
    """

    peak: int = 0
    left: int = 0

    def look(self) -> None:
        """Take account of all since the last look; to be called between two sessions."""
        gc.collect()
        if torch.cuda.is_available():
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            self.left = max(self.left, torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()


@dataclass
class Share:
    """What one process did. ``of`` counts the steps of each dimension and of each backend."""

    steps: int
    of: Counter[str]
    scenarios: int
    readings: int
    findings: list[str]
    first: Memory
    last: Memory

    @property
    def has_grown(self) -> bool:
        """Whether the last steps took more memory of the device than the first ones."""
        return self.last.peak > self.first.peak or self.last.left > self.first.left


def endless(process: int) -> Iterator[Scenario]:
    """Drawn scenarios and served batches by turns."""
    random = Random(process)
    for chunk in count():
        yield from drawn(1000 * process + chunk, 30)
        for worker, traits in WORKERS.items():
            backend = random.choice(["TRTLLM", "DSA"]) if traits.sparse else "TRTLLM"
            yield serving(
                worker,
                batch=random.randint(1, 16),
                draft_len=random.randint(2, 5),
                steps=40,
                backend=backend,
                seed=random.randrange(1 << 30),
                **drawn_dimensions(random, worker, backend),
            )


def share(process: int, steps: int, device: str, ends: int = ENDS) -> Share:
    """Run at least ``steps`` steps, of which the last ``ends`` are those of the first scenarios again."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(process % torch.cuda.device_count())
    hunt = DeviceHunt(PortableEngine(device))
    first, last, findings = Memory(), Memory(), []
    begun: list[Scenario] = []
    of: Counter[str] = Counter()

    def run(scenario: Scenario) -> None:
        config, steps = scenario.config, len(scenario.steps)
        of["replay"] += sum(step.phase is Phase.REPLAY for step in scenario.steps)
        of[config.attention_backend] += steps
        of.update({name: steps for name in DIMENSIONS if getattr(config, name) != getattr(PLAIN, name)})
        finding = hunt.run(scenario)
        if finding is not None:
            findings.append(f"process {process}: {finding} in {finding.scenario}")

    scenarios = endless(process)
    # What is made once in a process, kernels and constants, is made now, and stays: to collect is cheap from now on.
    run(next(scenarios))
    Memory().look()
    gc.freeze()
    while sum(len(scenario.steps) for scenario in begun) < ends:
        begun.append(next(scenarios))
        run(begun[-1])
        first.look()
    while hunt.steps < steps - ends:
        run(next(scenarios))
    Memory().look()
    for scenario in begun:
        run(scenario)
        last.look()
    gc.unfreeze()
    if (finding := hunt.read()) is not None:
        findings.append(f"process {process}: {finding} in {finding.scenario}")
    return Share(hunt.steps, of, hunt.scenarios, hunt.readings, findings, first, last)


def long_run(steps: int, processes: int, device: str = "cuda") -> dict[str, Any]:
    """Run at least ``steps`` steps in all, shared out over ``processes``."""
    begin = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        shares = list(pool.map(share, range(processes), [-(-steps // processes)] * processes, [device] * processes))
    found = faults(shares, steps)
    return {
        "passed": not found,
        "faults": found,
        "steps": sum(s.steps for s in shares),
        "steps_of": dict(_of(shares).most_common()),
        "processes": processes,
        "scenarios": sum(s.scenarios for s in shares),
        "readings": sum(s.readings for s in shares),
        "seconds": time.perf_counter() - begin,
        "memory_of_first_and_last_thousand_steps": [[asdict(s.first), asdict(s.last)] for s in shares],
    }


def faults(shares: list[Share], steps: int) -> list[str]:
    """Why a run that was asked for ``steps`` steps has not passed; empty if it has."""
    done, of = sum(s.steps for s in shares), _of(shares)
    found = [] if done >= steps else [f"{done} steps of {steps}"]
    found += [f"no step with {name}" for name in ("replay", *DIMENSIONS) if not of[name]]
    found += [finding for s in shares for finding in s.findings]
    found += [f"process {i}: nothing was read" for i, s in enumerate(shares) if not s.readings]
    return found + [f"process {i}: memory has grown" for i, s in enumerate(shares) if s.has_grown]


def _of(shares: list[Share]) -> Counter[str]:
    return sum((s.of for s in shares), Counter())


def main() -> None:
    """Run, record, and end with 1 if it has not passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.long_run", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=28)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="folder of the record, instead of benchmarks/results")
    options = parser.parse_args()
    values = long_run(options.steps, options.processes, options.device)
    record("long_run", values, options.output)
    sys.exit(not values["passed"])


if __name__ == "__main__":
    main()
