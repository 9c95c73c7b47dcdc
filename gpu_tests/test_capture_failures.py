"""A capture that fails, and the captures after it.

What is verified:

1. An exception at each seam that a capture passes, raised while the stream is being captured, ends the capture and
   leaves the stream usable: the very next capture of the same engine succeeds, and everything from it on (a prompt,
   replays, an eager batch) is right by the oracle and has text, counts and caches of an engine that never failed.
2. The same of an exception in each torch function that a capture calls, for a worker of each kind. So the memory pool
   of graphs outlives a failure, or another takes its place.
3. After a failed capture no graph is left that could be replayed.
4. After each test the device still computes.

Each run takes a third of the cases, of each a few of its seams, and of the torch functions a dozen; the next day's
takes others (``--whole``: all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from engines import SEAMS, run
from engines.base import TORCH
from engines.portable import PortableEngine, PortableSession
from gpu_tests.driving import CASES, IDS, drive, life, opened, runner
from gpu_tests.sampling import Sampled
from invariants import verify
from scenarios import Fault, FaultKind, Phase, Scenario, Step, Trace

cases = pytest.mark.parametrize(("worker", "name"), CASES, ids=IDS)


def story(worker: str, name: str) -> Scenario:
    """A life whose graph is captured without a warm-up forward, so that what fails fails in the capture."""
    return life(worker, name, graph_warmup_runs=0)


def sites(scenario: Scenario, family: str) -> Mapping[str, int]:
    """Sites that the capture passes."""
    (first, *_), engine = scenario.steps, PortableEngine("cpu")
    return run(engine, replace(scenario, steps=(first,)), record=[family]).steps[0].sites


def go_on(session: PortableSession) -> None:
    """Let a session live on after a start-up failure, which ends upstream's process."""
    session._over = False
    session._plan.leave()


def failing_first(scenario: Scenario, site: str, occurrence: int = 1) -> Trace:
    """The run of a session whose first capture has failed, and which lives through the scenario then."""
    first = scenario.steps[0]
    assert first.phase is Phase.CAPTURE
    with opened(scenario) as session:
        fails(session, first, site, occurrence)
        assert not left_to_replay(session) or came_to_its_end(session), site
        go_on(session)
        for step in scenario.steps:
            session.step(step)
        return session.trace()


def left_to_replay(session: PortableSession) -> bool:
    """Whether there is a graph that could be replayed."""
    return any(graph.graph is not None for graph in runner(session).graphs.values())


def came_to_its_end(session: PortableSession) -> bool:
    """Whether the capture had succeeded when the step failed: what comes after it is the sampler's."""
    return any(substep.name == "restored" for substep in session.trace().steps[-1].substeps)


def fails(session: PortableSession, step: Step, site: str, occurrence: int) -> None:
    """Let the step fail, and the device be as good as before."""
    fault = Fault(site=site, occurrence=occurrence, kind=FaultKind.ERROR)
    trace = session.step(replace(step, fault=fault))
    assert (trace.outcome, trace.fired) == ("fatal", 1), site
    assert not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing()


OUTSIDE = (
    "kv_cache_manager.prepare_resources",
    "draft_kv_cache_manager.prepare_resources",
    "model_engine.prepare_inputs",
    "attn_metadata.prepare",
    "spec_metadata.prepare",
    "sampler.update_requests",
)
"""Seams that a step passes before its capture begins or after it has ended."""
OUTCOME = ("emitted", "target_kv", "draft_kv", "kv_tokens", "py_rewind_len", "py_num_accepted_draft_tokens")
"""What does not depend on which pages and slots are free."""


def assert_recovers(scenario: Scenario, right: Trace, site: str, occurrence: int) -> None:
    """After a failure there the scenario goes as if there had been none."""
    whole = failing_first(scenario, site, occurrence)
    trace = replace(whole, steps=tuple(replace(step, index=step.index - 1) for step in whole.steps[1:]))
    assert not verify(scenario, lambda _: trace, relations=False).violations, f"{site}@{occurrence}"
    for one, other in zip(trace.steps, right.steps, strict=True):
        ends = [step.substeps[-1].fields for step in (one, other)]
        for field in OUTCOME:
            assert ends[0].get(field) == ends[1].get(field), f"{site}@{occurrence}, step {one.index}, {field}"


@pytest.mark.turns(3)
@cases
def test_a_capture_succeeds_after_one_that_failed_at_any_seam(worker: str, name: str, sampled: Sampled) -> None:
    scenario = story(worker, name)
    right = drive(scenario)
    passed = sites(scenario, SEAMS)
    assert {"cuda_graph.capture", "target_model.forward"} <= passed.keys()
    points = [(site, n) for site, last in passed.items() if site not in OUTSIDE for n in sorted({1, last})]
    for site, occurrence in sampled(points, 4):
        assert_recovers(scenario, right, site, occurrence)


@pytest.mark.parametrize("worker", ["Eagle3OneModelWorker", "PARDWorker", "MTPEagleDynamicTreeWorker"])
def test_and_at_any_torch_function(worker: str, sampled: Sampled) -> None:
    whole = story(worker, "TRTLLM")
    scenario = replace(whole, steps=whole.steps[:4])
    right = drive(scenario)
    for site, occurrences in sampled(list(sites(scenario, TORCH).items()), 12):
        assert_recovers(scenario, right, site, occurrences)
