"""What verifying and recording cost beside a bare step of the portable engine, on the CPU.

The ratios are measured in turns, so that a busy machine slows both sides, and are the median of many rounds:
a fully verified step (engine, observation, oracle, all invariants over one run) takes at most 2.0 times a bare one,
a step whose fault sites at seams and torch calls are counted at most 1.6 times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engines import SEAMS, TORCH, run
from engines.portable import PortableEngine
from invariants import verify
from scenarios import WORKERS, Config, Context, Generation, Request, Scenario, Step, check

ENGINE = PortableEngine()
ROUNDS = 20


def serving(worker: str, steps: int = 12) -> Scenario:
    """Three requests that are prefilled together and then generate, K = 3."""
    agree = 2 if WORKERS[worker].drafts_for_contexts else 0
    requests = tuple(Request(id=i, prompt_len=4 + i) for i in range(3))
    prefill = Step(
        draft_len=3, contexts=tuple(Context(request=r.id, chunk=r.prompt_len, agree=agree) for r in requests)
    )
    decode = Step(draft_len=3, generations=tuple(Generation(request=r.id, agree=r.id % 3) for r in requests))
    topk, nodes = (2, 6) if WORKERS[worker].tree else (0, 0)
    config = Config(worker=worker, max_draft_len=3, dynamic_tree_max_topK=topk, max_total_draft_tokens=nodes)
    return check(Scenario(config=config, requests=requests, steps=(prefill, *[decode] * (steps - 1))))


def bare(scenario: Scenario) -> Any:
    """Run it with nothing observed."""
    return run(ENGINE, scenario, observe=False)


def verified(scenario: Scenario) -> Any:
    """Run it with a full trace, and ask all invariants over one run."""
    verdict = verify(scenario, lambda s: run(ENGINE, s), relations=False)
    assert not verdict.violations
    return verdict


def recording(scenario: Scenario) -> Any:
    """Run it with fault sites counted, at seams and torch calls."""
    return run(ENGINE, scenario, observe=False, record=[SEAMS, TORCH])


def ratio(one: Callable[[Scenario], Any], other: Callable[[Scenario], Any], scenario: Scenario) -> float:
    """Median over rounds of the time of ``one`` by that of ``other``, run in turns."""
    ratios = []
    for _ in range(ROUNDS):
        times = []
        for function in (one, other):
            start = time.perf_counter()
            function(scenario)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("kind", [bare, verified, recording], ids=lambda kind: kind.__name__)
def test_steps(benchmark: Any, kind: Callable[[Scenario], Any], worker: str) -> None:
    scenario = serving(worker)
    benchmark.group = worker
    benchmark(kind, scenario)
    benchmark.extra_info["steps_per_second"] = len(scenario.steps) / benchmark.stats.stats.median


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize(("kind", "most"), [(verified, 2.0), (recording, 1.6)], ids=["verified", "recording"])
def test_ratio_to_a_bare_step(benchmark: Any, kind: Callable[[Scenario], Any], most: float, worker: str) -> None:
    benchmark.group = "ratio to a bare step"
    measured = benchmark.pedantic(ratio, args=(kind, bare, serving(worker)), rounds=1, warmup_rounds=0)
    benchmark.extra_info["ratio"] = measured
    print(f"{kind.__name__} / bare, {worker}: {measured:.2f}")
    assert measured <= most
