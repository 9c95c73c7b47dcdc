"""The portable engine on a CUDA device, with real CUDA graphs.

What is verified:

1. A scenario of any backend gives the same trace on CUDA as on CPU, value by value: eager steps, the warm-up runs
   and the capture of a graph, its replays, failing steps. While a graph is captured the device cannot be read, so
   those values are absent; graphs are emulated on CPU (PR #11696 is about what a real one repeats).
2. Every predicate holds on CUDA, and for each scenario one relation, both of whose runs are on CUDA: the next one that
   has a twin, from one on that is another every day. Each planned fault fires once.
3. The incidents of ``examples/`` hold, and are found with their bug put back (PR #16382, PR #17381, PR #11696,
   PR #16925).
4. After each test the device still computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from engines import SEAMS, run
from engines.portable import PortableEngine
from gpu_tests.driving import differing
from gpu_tests.sampling import Sampled
from invariants import all_invariants, verify
from invariants.registry import Relation
from museum import seeded
from scenarios import BACKENDS, WORKERS, Scenario, Trace, scenario_from_json
from scenarios.codec import parse
from strategies import faulted_scenarios, scenarios

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.json"))

PARTS = 4
"""Of a search, so that no process is left with much more than the others."""

RELATIONS = [one for one in all_invariants() if isinstance(one, Relation)]
PREDICATES = {one.slug for one in all_invariants()} - {one.slug for one in RELATIONS}

bounded = settings(
    max_examples=6,
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
parts = pytest.mark.parametrize("part", range(PARTS))


def on(device: str, scenario: Scenario) -> Trace:
    return run(PortableEngine(device), scenario)


def turns(sampled: Sampled, part: int) -> Iterator[Relation]:
    """The relations, over and over."""
    begin = (sampled.turn + part * len(RELATIONS) // PARTS) % len(RELATIONS)
    return cycle(RELATIONS[begin:] + RELATIONS[:begin])


def assert_right(scenario: Scenario, on_cuda: Trace, relations: Iterator[Relation]) -> None:
    """The run has the values of a CPU, and every predicate holds, and the next relation that has a twin."""
    assert differing(on_cuda, on("cpu", scenario)) == []
    with_twin = (relation.slug for relation in islice(relations, len(RELATIONS)) if relation.twin(scenario))
    asked = {*PREDICATES, *islice(with_twin, 1)}
    assert not verify(scenario, lambda s: on_cuda if s is scenario else on("cuda", s), only=asked).violations


@parts
@pytest.mark.parametrize("worker", WORKERS)
def test_clean_scenarios(worker: str, part: int, sampled: Sampled) -> None:
    relations = turns(sampled, part)

    @seed(part)
    @bounded
    @given(scenarios(workers=[worker], backends=BACKENDS, variants=PortableEngine.variants))
    def hold(scenario: Scenario) -> None:
        assert_right(scenario, on("cuda", scenario), relations)

    hold()


@parts
@pytest.mark.parametrize("worker", WORKERS)
def test_failing_scenarios(worker: str, part: int, sampled: Sampled) -> None:
    relations = turns(sampled, part)

    def sites(scenario: Scenario) -> dict[str, int]:
        return dict(run(PortableEngine("cpu"), scenario, record=[SEAMS]).steps[-1].sites)

    @seed(PARTS + part)
    @bounded
    @given(faulted_scenarios(record=sites, workers=[worker], backends=BACKENDS, variants=PortableEngine.variants))
    def hold(scenario: Scenario) -> None:
        on_cuda = on("cuda", scenario)
        planned = sum(step.fault is not None for step in scenario.steps[: len(on_cuda.steps)])
        assert sum(step.fired for step in on_cuda.steps) == planned
        assert_right(scenario, on_cuda, relations)

    hold()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_incidents(path: Path) -> None:
    story = parse(path.read_text())
    scenario = scenario_from_json(story["scenario"])
    assert not verify(scenario, lambda s: on("cuda", s)).violations
    with seeded(story["bug"]):
        assert verify(scenario, lambda s: on("cuda", s)).violations
