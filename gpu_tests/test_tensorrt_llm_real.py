"""Upstream's own worker and metadata classes, with CUDA tensors and real CUDA graphs.

What is verified:

1. Nothing is skipped unless no source is given in ``SPECFUZZ_TRTLLM_SOURCE`` (a checkout of NVIDIA/TensorRT-LLM; no
   build is needed), or Python is older than 3.12 where 4 says so; the table of the run then says it. Without a CUDA
   device every test fails.
2. Whatever the doctor calls drivable is driven: each worker lives through general warm-up, the warm-up runs and the
   capture of a CUDA graph, prompts, mixed batches, generations and a replay of that graph. A worker that the class
   guard of PR #16382 rejects is reported as rejected, and driven without the guard.
3. The trace on CUDA is the trace of the CPU emulation, value by value: a field named ``*_cuda`` holds on the device
   what it holds in the emulation. While a graph is captured the device cannot be read, so those values are absent.
4. The same holds for failing steps: a fault at each seam of a mixed batch, in serving and in general warm-up, and
   on Python 3.12 and newer at each line of upstream's loaded modules that the mixed batch passes.
5. The state that a step leaves behind is the same on both, and on both it is rewritten before it is read (PR #16382,
   PR #17381).
6. Metadata passed by position gives the trace of metadata passed by keyword.
7. After each test the device still computes.

Of the fault points of 4 a run takes a dozen seams and two dozen lines of each worker, the next day's others
(``--whole``: all, which is minutes for a worker).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch

from engines import LINES, SEAMS, run
from engines.leftovers import READ
from engines.tensorrt_llm import KEYWORD, POSITIONAL, TensorrtLlmEngine, doctor
from engines.tensorrt_llm.leftovers import evidence
from engines.tensorrt_llm.source import HOW_TO_PROVIDE
from engines.upstream import DRIVEN, SOURCE_VARIABLE
from gpu_tests.comparison import assert_same, drivable, values
from gpu_tests.requirements import NO_SOURCE, OLD_PYTHON
from gpu_tests.sampling import Sampled
from invariants import verify
from scenarios import WORKERS, Phase, Scenario, Trace, check
from tests.engines.tensorrt_llm.cases import failing, life, lives

MIXED, WARM_UP = 3, 0
"""Steps of ``life``."""

KNOWN = {
    "forward-not-overridden": "pre-fix workers define forward (PR #16382)",
    "saved-state-empty": "pre-fix workers leak the saved state of a failed step (PR #16382)",
    "saved-fields": "the same leak, still there when the next forward verifies drafts",
    "restored-identity": "the same leak, seen by the objects that stay exchanged",
    "steps-complete": "the same leak, in the steps after the failed one",
    "kv-lens-balanced": "pre-fix workers owe the rewind of a failed step (PR #16382)",
    "restored-layout": "num_contexts and request types are not put back (PR #17381)",
    "request-types-match-layout": "a failure between the assignments of the two leaves them apart (PR #17381)",
    "layout-equals-reference": "num_contexts and request types are not put back (PR #17381)",
}
"""Invariants that these versions of upstream are known to violate in the scenarios of this module, and why."""

LOST_CONTEXT = {
    "acceptance-equals-reference",
    "acceptance-follows-agreement",
    "batch-equals-requests-alone",
    "ctx-len-counts-committed",
    "draft-block-follows-context",
    "draft-context-equals-cache",
    "drafts-equal-reference",
    "inputs-equal-reference",
    "kv-content-equals-reference",
    "kv-ledger-equals-reference",
    "kv-lens-equals-reference",
    "ctx-len-rolled-back",
    "startup-leaves-no-trace",
}
"""What follows when DFlash drops the context of a request that a batch leaves out, and when it makes its buffers for
the rows of a graph: sections 7 to 9 of docs/upstream-findings.md. In its last line nothing is pending any more."""

SHORT_LAYERS = {
    "acceptance-equals-reference",
    "acceptance-follows-agreement",
    "batch-equals-requests-alone",
    "chunked-equals-one-shot",
    "corrected-lengths-are-committed-plus-fed",
    "derived-counters-consistent",
    "host-equals-device",
    "draft-position-is-kv-minus-one",
    "drafts-equal-reference",
    "inputs-equal-reference",
    "kv-content-equals-reference",
    "kv-ledger-equals-reference",
    "kv-lens-equals-reference",
    "next-step-equals-never-failed-twin",
    "oracle-drafter-accepts-all",
    "startup-leaves-no-trace",
    "tables-name-owned-pages",
    "tree-masks-put-back",
    "tree-widths-share-one-stride",
    "trees-equal-reference",
    "warm-up-forward-is-a-fixed-point",
}
"""What follows when the layers of a tree see too few tokens of a generation, and contexts keep their drafts without a
tree: sections 11 to 13 of docs/upstream-findings.md. A failure between two assignments, or in the hook that derives the
counters, leaves these and the copies of lengths apart."""


@pytest.fixture(scope="module")
def source() -> str:
    """The checkout that was asked for."""
    path = os.environ.get(SOURCE_VARIABLE)
    if not path:
        pytest.skip(f"{NO_SOURCE}: {HOW_TO_PROVIDE}")
    if not torch.cuda.is_available():
        pytest.fail(f"torch {torch.__version__} finds no CUDA device: run this module where there is one")
    return path


@pytest.fixture(scope="module")
def cuda(source: str) -> TensorrtLlmEngine:
    """The real classes on CUDA."""
    return TensorrtLlmEngine(source, "cuda", unguarded=True)


@pytest.fixture(scope="module")
def emulated(source: str) -> TensorrtLlmEngine:
    """The real classes on the CPU emulation."""
    return TensorrtLlmEngine(source, "cpu", unguarded=True)


def known(worker: str) -> set[str]:
    """Invariants that these versions of a worker are known to violate."""
    traits = WORKERS[worker]
    return set(KNOWN) | (LOST_CONTEXT if traits.keeps_context else SHORT_LAYERS if traits.tree else set())


def without_startup(scenario: Scenario) -> Scenario:
    """The eager served steps alone."""
    return replace(scenario, steps=tuple(step for step in scenario.steps if step.phase is Phase.EAGER))


def scenarios_of(engine: TensorrtLlmEngine, worker: str) -> list[Scenario]:
    """Scenarios that this version of the worker can run."""
    return [check(scenario) for scenario in lives(worker) if drivable(engine, scenario)]


def test_the_doctor_finds_every_worker_or_says_why_not(source: str) -> None:
    verdicts = {verdict.name: verdict for verdict in doctor(source)}
    assert verdicts["AttentionMetadata"].drivable
    assert verdicts["SpecWorkerBase"].drivable
    for worker in DRIVEN:
        verdict = verdicts[worker]
        assert verdict.drivable or "guard rejects it" in verdict.reason, verdict


def violated(scenario: Scenario, trace: Trace) -> set[str]:
    """Invariants that this run of the scenario violates."""
    return {v.invariant for v in verify(scenario, lambda _: trace, relations=False).violations}


@pytest.mark.parametrize("worker", DRIVEN)
def test_traces_are_those_of_the_emulation(cuda: TensorrtLlmEngine, emulated: TensorrtLlmEngine, worker: str) -> None:
    for scenario in scenarios_of(emulated, worker):
        assert_same(run(cuda, scenario), run(emulated, scenario))


@pytest.mark.parametrize("worker", DRIVEN)
def test_a_whole_life_holds_all_but_what_is_known(cuda: TensorrtLlmEngine, worker: str) -> None:
    verdict = verify(life(worker), lambda scenario: run(cuda, scenario))
    assert {v.invariant for v in verdict.violations} <= known(worker)
    assert verdict.counts["acceptance-equals-reference"][0] > 0


@pytest.mark.parametrize("worker", DRIVEN)
@pytest.mark.parametrize("step", [MIXED, WARM_UP])
def test_a_fault_at_any_seam_leaves_the_state_of_the_emulation(
    cuda: TensorrtLlmEngine, emulated: TensorrtLlmEngine, worker: str, step: int, sampled: Sampled
) -> None:
    whole = life(worker)
    scenario, step = (without_startup(whole), 1) if step == MIXED else (whole, step)
    sites = run(emulated, scenario, record=[SEAMS]).steps[step].sites
    points = [(site, n + 1) for site, occurrences in sites.items() for n in range(occurrences)]
    for site, occurrence in sampled(points, 12):
        failed = failing(scenario, step, site, occurrence)
        on_cuda, on_cpu = run(cuda, failed), run(emulated, failed)
        assert on_cuda.steps[step].fired == 1, f"{site}@{occurrence}"
        assert_same(on_cuda, on_cpu)
        assert violated(failed, on_cuda) <= known(worker), f"{site}@{occurrence}"


@pytest.mark.parametrize("worker", DRIVEN)
def test_a_fault_at_any_line_leaves_the_state_of_the_emulation(
    cuda: TensorrtLlmEngine, emulated: TensorrtLlmEngine, worker: str, sampled: Sampled
) -> None:
    if sys.version_info < (3, 12):
        pytest.skip(f"{OLD_PYTHON}, for faults at source lines")
    scenario = without_startup(life(worker))
    sites = run(emulated, scenario, record=[LINES]).steps[1].sites
    files = {site.split(":")[1] for site in sites}
    assert {path.rpartition("/")[2] for path in files} >= {"interface.py"}
    for site in sampled(list(sites), 24):
        failed = failing(scenario, 1, site)
        on_cuda, on_cpu = run(cuda, failed), run(emulated, failed)
        assert on_cuda.steps[1].fired == 1, site
        assert_same(on_cuda, on_cpu)
        assert violated(failed, on_cuda) <= known(worker), site


@pytest.mark.parametrize("worker", DRIVEN)
def test_what_is_left_behind_is_rewritten_before_it_is_read(
    cuda: TensorrtLlmEngine, emulated: TensorrtLlmEngine, worker: str
) -> None:
    for scenario in (life(worker), failing(life(worker), MIXED, "draft_model.logits")):
        on_cuda, on_cpu = evidence(cuda, scenario), evidence(emulated, scenario)
        left = [(step, item.field, item.left, item.fate) for step, items in on_cuda.items() for item in items]
        assert left == [(step, item.field, item.left, item.fate) for step, items in on_cpu.items() for item in items]
        assert not [entry for entry in left if entry[-1] == READ]


@pytest.mark.parametrize("worker", DRIVEN)
def test_metadata_by_position_gives_the_same_trace(source: str, worker: str) -> None:
    by = {
        call: run(TensorrtLlmEngine(source, "cuda", metadata=call, unguarded=True), life(worker))
        for call in (KEYWORD, POSITIONAL)
    }
    assert [values(s) for s in by[POSITIONAL].steps] == [values(s) for s in by[KEYWORD].steps]
