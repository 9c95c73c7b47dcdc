"""A real out-of-memory error, raised by the allocator of a process whose share of the device is used up (PR #16382).

What is verified:

1. General warm-up at the largest shape runs out of memory in each call that allocates: the target's forward, the save
   of the metadata, a draft forward, the draft head. The executor tolerates it; the state right after it, and
   every step that follows (a capture, a prompt, a replay), is that of the same failure injected at the same call.
2. The scenario with the injected failure holds every predicate on CUDA, so the real one does.
3. With TRT-01 put back, the real failure leaves what PR #16382 is about: saved tensors that nobody restores.
4. The same with ``throw_on_cudamalloc_oom`` where this torch has it.
5. Memory is given back: the allocation that failed succeeds once the share is restored, and the device computes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from engines import SEAMS, run
from engines.portable import PortableEngine
from faults import bracket
from gpu_tests.driving import K, config, differences, drive, dummies, generation, opened
from gpu_tests.requirements import NO_SUCH_OPTION
from invariants import verify
from museum import seeded
from scenarios import WORKERS, Context, Fault, FaultKind, Phase, Request, Scenario, Step, Trace, check

WORKSPACE = 1 << 30
"""Bytes of a workspace at the largest shape; the share leaves half of it."""
SITES = ("target_model.forward", "attn_metadata.prepare_for_spec_dec", "draft_model.forward", "draft_model.logits")
ACCOUNT = ("exception", "message", "raised_at")
"""How an error calls itself."""
OPTION = "throw_on_cudamalloc_oom"


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    gc.collect()
    workspace()
    torch.cuda.empty_cache()


@pytest.fixture(params=[False, True], ids=["by-default", OPTION])
def throws(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the allocator says no before it asks the driver."""
    if not request.param:
        yield False
        return
    # Renamed when the allocators of all accelerators got one.
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    try:
        settings(f"{OPTION}:True")
    except (RuntimeError, ValueError):
        pytest.skip(f"{NO_SUCH_OPTION}: torch {torch.__version__} has no {OPTION}")
    yield True
    settings(f"{OPTION}:False")


def workspace() -> torch.Tensor:
    """What a call at the largest shape needs beside its results."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")


@contextmanager
def little_memory() -> Iterator[None]:
    """This process may have half a workspace more than it has."""
    torch.cuda.empty_cache()
    share = torch.cuda.memory_reserved() + WORKSPACE // 2
    torch.cuda.set_per_process_memory_fraction(share / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def story(worker: str) -> Scenario:
    """General warm-up at the largest shape, then a life."""
    agree = K if WORKERS[worker].drafts_for_contexts else 0
    settings = config(worker, "TRTLLM")
    rows = settings.max_num_requests
    pasts = range(settings.least_history + 4, settings.least_history + 3 + rows)
    chunk = settings.max_num_tokens - (rows - 1) * settings.tokens_per_gen_step(K)
    chunk = min(chunk, settings.max_seq_len - settings.num_extra_kv_tokens)
    largest = Step(
        draft_len=K,
        phase=Phase.WARMUP,
        contexts=(Context(request=None, chunk=chunk, agree=agree),),
        generations=dummies(worker, *pasts),
    )
    steps = (
        largest,
        Step(draft_len=K, phase=Phase.CAPTURE, generations=dummies(worker, 8)),
        Step(draft_len=K, contexts=(Context(request=0, chunk=5, agree=agree),)),
        Step(draft_len=K, phase=Phase.REPLAY, generations=(generation(0, K),)),
        Step(draft_len=K, generations=(generation(0, 1),)),
    )
    requests = (Request(id=0, prompt_len=5),)
    return check(Scenario(config=replace(settings, num_blocks=256), requests=requests, steps=steps))


def sites(scenario: Scenario) -> list[tuple[str, int]]:
    """The first and the last call in general warm-up of each site that allocates."""
    only = replace(scenario, steps=scenario.steps[:1])
    passed = run(PortableEngine("cpu"), only, record=[SEAMS]).steps[0].sites
    return [(site, n) for site in SITES if site in passed for n in sorted({1, passed[site]})]


def injected(scenario: Scenario, site: str, occurrence: int) -> Scenario:
    """The same with that failure planned."""
    fault = Fault(site=site, occurrence=occurrence, kind=FaultKind.OOM)
    return replace(scenario, steps=(replace(scenario.steps[0], fault=fault), *scenario.steps[1:]))


def really(planned: Scenario) -> Trace:
    """Run the scenario; where its general warm-up is to fail it really runs out of memory instead."""
    with opened(planned) as session:
        first, *others = planned.steps
        with little_memory(), mock.patch.object(bracket, "make", side_effect=lambda fault: workspace()):
            failed = session.step(first)
        end = failed.find("failed")
        assert end is not None, first.fault
        assert (end["exception"], failed.fired, failed.injected) == ("OutOfMemoryError", 1, False), first.fault
        assert "CUDA out of memory" in end["message"]
        for step in others:
            if session.step(step).outcome == "fatal":
                break
        return session.trace()


@pytest.mark.parametrize("worker", WORKERS)
def test_a_real_failure_is_the_injected_one(worker: str, throws: bool) -> None:
    scenario = story(worker)
    for site, occurrence in sites(scenario):
        planned = injected(scenario, site, occurrence)
        verdict = verify(planned, drive, relations=False)
        assert not verdict.violations, f"{site}@{occurrence}"
        real = really(planned)
        assert real.steps[0].outcome == "tolerated", f"{site}@{occurrence}"
        assert differences(real, verdict.trace, left_out=ACCOUNT) == [], f"{site}@{occurrence}"


@pytest.mark.parametrize("worker", [w for w, traits in WORKERS.items() if traits.draft_model])
def test_without_the_cleanup_it_leaks(worker: str) -> None:
    planned = injected(story(worker), "draft_model.logits", 1)
    with seeded(f"TRT-01/{worker}"):
        real = really(planned)
    failed = real.steps[0].find("failed")
    assert failed is not None
    assert failed["_saved_tensors"]
    found = verify(planned, lambda _: real, only=["saved-state-empty"], relations=False).violations
    assert {violation.invariant for violation in found} == {"saved-state-empty"}
