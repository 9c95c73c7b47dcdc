"""Upstream's own metadata of both backends, with CUDA tensors and real CUDA graphs.

Two checkouts are driven: in ``stale`` the sparse metadata is that of before PR #16925, in ``fixed`` that of after it.
They are folders of, or beside, ``SPECFUZZ_TRTLLM_SOURCE``; ``SPECFUZZ_TRTLLM_METADATA`` names another place. A test
whose checkout is missing is skipped and says so.

What is verified:

1. Both checkouts have both classes driven, and none of them is replaced by the suite's.
2. Each worker's life (general warm-up, capture, prompts in one go and in chunks, mixed batches, replays, a draft length
   that varies) gives the trace of the CPU emulation on either backend, value by value.
3. So do generated scenarios with sparse attention, clean and with a fault at a seam, which fires once. Those of
   ``stale`` are eager: beyond its table that class asserts in an eager step and reads on while a graph is captured.
4. The stale map is found by its values, and by acceptance alone, in a life and in generated scenarios; in a replayed
   step, where no draft call is seen, by acceptance. The class after PR #16925 shows neither.
5. After each test the device still computes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from engines import SEAMS, run
from engines.tensorrt_llm import TensorrtLlmEngine
from engines.upstream import DRIVEN, DRIVEN_BACKENDS, SOURCE_VARIABLE
from fuzz.draws import each_anew, from_the_seed_alone
from gpu_tests.comparison import assert_same, drivable, on_dsa
from gpu_tests.requirements import NO_SOURCE
from invariants import verify
from scenarios import BACKENDS, WORKERS, Config, Scenario, check
from strategies import configs, faulted_scenarios, scenarios
from tests.engines.tensorrt_llm.cases import KMAX, life, lives, replayed

METADATA_VARIABLE = "SPECFUZZ_TRTLLM_METADATA"
CHECKOUTS = ("stale", "fixed")
LINEAR = [worker for worker in DRIVEN if not WORKERS[worker].tree]
"""Workers whose metadata is upstream's; trees are on the suite's."""
LOOPS = ("Eagle3OneModelWorker", "MTPEagleWorker", "DraftTargetOneModelWorker")
"""Workers with a draft loop, whose later calls meet the map."""
BY_STATE, BY_ACCEPTANCE = "req-idx-matches-layout", "acceptance-follows-agreement"
EXAMPLES = 6
DRAWN = 150
"""Scenarios in which a defect must show that one in some fifteen shows."""

bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@cache
def engine(checkout: str, device: str) -> TensorrtLlmEngine:
    """The classes of a checkout; skips the test where there is none."""
    asked = os.environ.get(METADATA_VARIABLE) or os.environ.get(SOURCE_VARIABLE) or "."
    places = [folder / checkout for folder in (Path(asked), Path(asked).parent)]
    found = next((place for place in places if (place / "tensorrt_llm").is_dir()), None)
    if found is None:
        pytest.skip(
            f"{NO_SOURCE}: no checkout {checkout}/ in or beside {asked}: set {METADATA_VARIABLE} to a folder that has "
            "stale/ and fixed/, checkouts with DSAtrtllmAttentionMetadata as before and as after PR #16925"
        )
    return TensorrtLlmEngine(found, device, unguarded=True)


def violated(checkout: str, scenario: Scenario, *slugs: str, device: str = "cuda") -> set[str]:
    """Which of ``slugs`` the scenario violates there."""
    found = verify(scenario, lambda s: run(engine(checkout, device), s), only=slugs).violations
    return {violation.invariant for violation in found}


@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_both_classes_are_upstreams_own(checkout: str) -> None:
    upstream = engine(checkout, "cuda").upstream
    assert (upstream.fallbacks, set(upstream.metadata)) == ({}, set(DRIVEN_BACKENDS))
    for name in DRIVEN_BACKENDS:
        assert BACKENDS[name].metadata in {cls.__name__ for cls in upstream.metadata[name].__mro__}


@pytest.mark.parametrize("checkout", CHECKOUTS)
@pytest.mark.parametrize("worker", LINEAR)
def test_lives_are_those_of_the_emulation(checkout: str, worker: str) -> None:
    on_cuda, emulated = engine(checkout, "cuda"), engine(checkout, "cpu")
    for scenario in filter(lambda s: drivable(emulated, s), lives(worker)):
        both = [scenario, on_dsa(scenario)] if WORKERS[worker].sparse else [scenario]
        for case in map(check, both):
            assert_same(run(on_cuda, case), run(emulated, case))


def plain(worker: str, max_draft_len: int = 7) -> SearchStrategy[Config]:
    """Configurations that upstream's classes are driven with."""
    return configs(workers=[worker], backends=["DSA"], max_draft_len=max_draft_len, plain_caches=True)


@pytest.mark.parametrize("checkout", CHECKOUTS)
@pytest.mark.parametrize("worker", LOOPS)
def test_generated_scenarios_are_those_of_the_emulation(checkout: str, worker: str) -> None:
    on_cuda, emulated = engine(checkout, "cuda"), engine(checkout, "cpu")
    with_startup = checkout == "fixed"

    def sites(scenario: Scenario) -> Mapping[str, int]:
        return run(emulated, scenario, record=[SEAMS]).steps[-1].sites

    @seed(1)
    @bounded
    @given(scenarios(config=plain(worker), with_startup=with_startup))
    def clean(scenario: Scenario) -> None:
        assert_same(run(on_cuda, scenario), run(emulated, scenario))

    @seed(2)
    @bounded
    @given(faulted_scenarios(record=sites, config=plain(worker), with_startup=with_startup))
    def failing(scenario: Scenario) -> None:
        trace = run(on_cuda, scenario)
        assert [step.fired for step in trace.steps] == [
            int(step.fault is not None) for step in scenario.steps[: len(trace.steps)]
        ]
        assert_same(trace, run(emulated, scenario))

    clean()
    failing()


@pytest.mark.parametrize("worker", LOOPS)
def test_the_stale_map_is_found_by_state_and_by_acceptance_alone(worker: str) -> None:
    scenario = on_dsa(life(worker))
    for slug in (BY_STATE, BY_ACCEPTANCE, "oracle-drafter-accepts-all"):
        assert violated("stale", scenario, slug) == {slug}
        assert violated("fixed", scenario, slug) == set()


@pytest.mark.parametrize("worker", LOOPS)
def test_the_stale_map_of_a_replay_is_found_by_acceptance(worker: str) -> None:
    scenario = on_dsa(replayed(worker))
    verdict = verify(scenario, lambda s: run(engine("stale", "cuda"), s), only=[BY_ACCEPTANCE])
    assert {violation.step for violation in verdict.violations} == {len(scenario.steps) - 1}
    assert violated("fixed", scenario, BY_ACCEPTANCE) == set()


@pytest.mark.parametrize("worker", LOOPS)
def test_generated_scenarios_find_the_stale_map(worker: str) -> None:
    found: set[str] = set()

    @seed(3)
    @settings(parent=bounded, max_examples=DRAWN)
    @given(scenarios(config=plain(worker, max_draft_len=KMAX), max_steps=8, with_startup=False))
    def search(scenario: Scenario) -> None:
        # Longer pages, as the table of either class ends with the target's lengths.
        scenario = replace(scenario, config=replace(scenario.config, tokens_per_block=64))
        # By acceptance alone few show it, and the emulation tells which of them in a fraction of the time. A chunk
        # that is not its prompt's last costs acceptance with either class (docs/upstream-findings.md, section 5).
        asked = {BY_STATE, BY_ACCEPTANCE} - found
        shown = violated("stale", scenario, *asked, device="cpu") if asked else set()
        shown -= violated("fixed", scenario, *shown, device="cpu") if shown else set()
        if shown:
            assert violated("stale", scenario, *shown) == shown
            assert violated("fixed", scenario, *shown) == set()
            found.update(shown)

    with each_anew(), from_the_seed_alone():
        search()
    assert found == {BY_STATE, BY_ACCEPTANCE}
