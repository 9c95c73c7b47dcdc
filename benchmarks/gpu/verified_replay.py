"""What it costs to verify graph replays on the device: batch 64, draft length 4.

In turns, step by step of equal runs, so that a busy machine slows all of them:

bare        a replay of which nothing is observed
verified    the same, compared on the device at each sub-step, those inside the graph included
synchronised  each sub-step is read back in one piece, with one synchronisation, and compared on the host: what is
            between the ends of a forward can be read in an eager one only
traced      an eager step with a full trace, as any other run of the suite has it: one synchronisation per field
eager       the same step with nothing observed

Four pieces are timed:

graph     what the device needs for the graph alone, replayed again and again
forward   from inputs that are prepared to outputs that are there: what is compared of a forward, and the forward
checking  what comparing adds to a whole step of the same kind, replayed or eager
step      a whole step, whose host part (scheduling, pages, inputs, sampling) is the same in all of them

Targets: verified / bare at most 1.5, and at least 5 times as fast as with a synchronisation per sub-step; the record
says of each piece which of them it meets. A graph has no sub-steps to synchronise at, so the latter is asked of the
other pieces. What the oracle expects is computed beforehand, as it depends on the scenario alone; its cost is beside
the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import reference
from benchmarks.gpu.measure import bandwidth, count_launches, record, seconds_of, seconds_on_device, seconds_per_launch
from benchmarks.gpu.serving import serving
from engines import kernels
from engines.portable import Mismatches, PortableEngine, PortableSession
from engines.portable.device_checks import DeviceChecks
from engines.portable.mismatches import ANYTHING
from scenarios import Phase, Scenario, Trace

WARM: Final = 5
"""Steps after the start-up and the prompts that are not measured."""
MOST_BY_BARE: Final = 1.5
LEAST_BY_SYNCHRONISED: Final = 5.0
"""The targets."""


class SynchronisedMismatches(Mismatches):
    """Reads each sub-step back, in one piece, and compares it on the host."""

    def compare(self, actual: Tensor, expected: Tensor, begin: int) -> None:
        """Wait for the device, and compare."""
        said, seen = torch.stack([expected, actual.long()]).tolist()
        wrong = [i for i, (want, have) in enumerate(zip(said, seen)) if want not in (have, ANYTHING)]
        assert not wrong, "the clean engine has a finding"


class Run:
    """One way to run a scenario, step by step."""

    def __init__(self, scenario: Scenario, said: Trace, kind: str, device: str = "cuda") -> None:
        self._scenario = scenario
        engine = PortableEngine(device)
        self.mismatches = (SynchronisedMismatches if kind == "synchronised" else Mismatches)(torch.device(device))
        steps = iter(said.steps)
        self.session: PortableSession = (
            engine.open(scenario.config, scenario.requests, observe=kind == "traced")
            if kind in ("bare", "eager", "traced")
            else engine.open_checked(scenario.config, scenario.requests, lambda _: next(steps), self.mismatches)
        )
        self.session.foresee(scenario.steps)
        self._done = 0

    def step(self) -> None:
        """The next step."""
        self.mismatches.begin_step(self._done)
        outcome = self.session.step(self._scenario.steps[self._done]).outcome
        assert outcome == "ok", f"steps[{self._done}] ended {outcome}"
        self._done += 1

    def time_forwards(self) -> list[float]:
        """From now on each forward, with what is compared of it, adds its seconds to the list that this returns."""
        engine: Any = self.session._executor.model_engine
        times: list[float] = []

        def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                outputs: list[Any] = []
                times.append(seconds_of(lambda: outputs.append(forward(*args))))
                return outputs[0]

            return call

        engine.cuda_graph_runner.replay = timed(engine.cuda_graph_runner.replay)
        engine._forward_step = timed(engine._forward_step)
        return times

    def graph(self) -> Callable[[], Any]:
        """The replay of its only graph, and nothing else."""
        [captured] = self.session._executor.model_engine.cuda_graph_runner.graphs.values()
        assert captured.graph is not None
        return captured.graph.replay

    def values_inside(self) -> int:
        """Values that a replay compares between the ends of its forward."""
        checks = self.session._observer
        assert isinstance(checks, DeviceChecks)
        return checks.values_inside()


def measure(worker: str, batch: int, draft_len: int, steps: int) -> dict[str, Any]:
    """Medians, and what is behind them."""
    replayed, eager = (
        serving(worker, batch=batch, draft_len=draft_len, steps=2 * steps + WARM, phase=phase)
        for phase in (Phase.REPLAY, Phase.EAGER)
    )
    begin = time.perf_counter()
    said = {phase: reference.trace(s, in_graphs=True) for phase, s in (("replay", replayed), ("eager", eager))}
    oracle = (time.perf_counter() - begin) / (len(replayed.steps) + len(eager.steps))
    runs = {kind: Run(replayed, said["replay"], kind) for kind in ("bare", "verified")}
    runs |= {kind: Run(eager, said["eager"], kind) for kind in ("eager", "synchronised", "traced")}
    for run, scenario in zip(runs.values(), (replayed, replayed, eager, eager, eager)):
        for _ in range(len(scenario.steps) - 2 * steps):
            run.step()
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(steps):
        for kind, run in runs.items():
            times[kind].append(seconds_of(run.step))
    forwards = {kind: run.time_forwards() for kind, run in runs.items()}
    for _ in range(steps):
        for run in runs.values():
            run.step()
    for run in runs.values():
        assert (found := run.mismatches.read()) is None, f"the clean engine has a finding: {found}"
    step, forward = (
        {kind: 1e3 * statistics.median(values) for kind, values in taken.items()} for taken in (times, forwards)
    )
    # Last, as replays that nobody prepares run on with what the one before them left.
    graphs = {kind: runs[kind].graph() for kind in ("bare", "verified")}
    return {
        "worker": worker,
        "batch": batch,
        "draft_len": draft_len,
        "steps": steps,
        "kernels": kernels.default("cuda"),
        **compared(
            graph={kind: 1e3 * seconds_on_device(graph, 50) for kind, graph in graphs.items()},
            forward=forward,
            checking={
                kind: step[kind] - step[unobserved]
                for kind, unobserved in (("verified", "bare"), ("synchronised", "eager"), ("traced", "eager"))
            },
            step=step,
        ),
        "oracle_milliseconds_per_step": 1e3 * oracle,
        "graph_launches": {kind: count_launches(graph) for kind, graph in graphs.items()},
        "bytes_read_by_forwards": _bytes_read(replayed, batch, draft_len),
        "values_compared_inside": runs["verified"].values_inside(),
    }


def compared(**pieces: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of each piece, and which of them meets which target."""
    by_bare = {name: kinds["verified"] / kinds["bare"] for name, kinds in pieces.items() if "bare" in kinds}
    by_synchronised = {
        name: kinds["synchronised"] / kinds["verified"] for name, kinds in pieces.items() if "synchronised" in kinds
    }
    return {
        "milliseconds": pieces,
        "verified_by_bare": {name: [ratio, ratio <= MOST_BY_BARE] for name, ratio in by_bare.items()},
        "synchronised_by_verified": {
            name: [ratio, ratio >= LEAST_BY_SYNCHRONISED] for name, ratio in by_synchronised.items()
        },
    }


def _bytes_read(scenario: Scenario, batch: int, draft_len: int) -> int:
    """What the forwards of a replay have to read of the caches at least: int64, halfway through the run.

    The target reads its own, each draft call that and the drafter's.
    """
    length = scenario.config.max_seq_len // 2
    return 8 * batch * length * (1 + 2 * draft_len)


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.verified_replay", description=__doc__)
    parser.add_argument("--worker", default="Eagle3OneModelWorker")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, help="folder of the record, instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = measure(options.worker, options.batch, options.draft_len, options.steps)
    speed, launch = bandwidth(), seconds_per_launch()
    compared = 16 * values["values_compared_inside"]
    values["bandwidth_terabytes_per_second"] = speed / 1e12
    values["microseconds_per_launch_in_a_graph"] = 1e6 * launch
    values["floor_milliseconds"] = {
        kind: {
            "bytes": 1e3 * (values["bytes_read_by_forwards"] + more) / speed,
            "launches": 1e3 * values["graph_launches"][kind] * launch,
        }
        for kind, more in (("bare", 0), ("verified", compared))
    }
    record("verified_replay", values, options.output)


if __name__ == "__main__":
    main()
