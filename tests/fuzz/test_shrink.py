"""Shrinking keeps the failure and little else, whatever the failure needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from fuzz.shrink import repair, shrink
from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    Step,
    check,
    scenario_from_json,
    scenario_to_json,
    walk,
)
from scenarios.acceptance import VARIANTS
from strategies import scenarios
from tests.fuzz.samples import MIXED, size
from tests.museum.backend_cases import compressed

LARGE = check(
    Scenario(
        config=Config(worker="MTPEagleWorker", max_draft_len=7, tokens_per_block=3, num_blocks=99, seed=5),
        requests=(Request(id=0, prompt_len=9), Request(id=1, prompt_len=5), Request(id=2, prompt_len=2)),
        steps=(
            Step(phase=Phase.CAPTURE, draft_len=4, generations=(Generation(request=None, past=6, accept=4),) * 2),
            Step(
                phase=Phase.WARMUP,
                draft_len=6,
                contexts=(Context(request=None, chunk=8, agree=2),),
                fault=Fault(site="draft_model.forward", occurrence=5, kind=FaultKind.OOM),
            ),
            Step(draft_len=4, contexts=(Context(request=0, chunk=4), Context(request=1, chunk=5, agree=4))),
            Step(
                draft_len=3,
                contexts=(Context(request=0, chunk=5, agree=3),),
                generations=(Generation(request=1, agree=2),),
            ),
            Step(
                phase=Phase.REPLAY,
                draft_len=4,
                generations=(Generation(request=1, agree=4), Generation(request=0, agree=1)),
                finish=(1,),
            ),
            Step(draft_len=7, contexts=(Context(request=2, chunk=2),), generations=(Generation(request=0, agree=6),)),
        ),
    )
)


def steps(*wanted: Callable[[Step], bool]) -> Callable[[Scenario], bool]:
    """A failure that needs steps that are like this, in this order."""

    def fails(scenario: Scenario) -> bool:
        left = list(wanted)
        for step in scenario.steps:
            if left and left[0](step):
                left.pop(0)
        return not left

    return fails


def minimal(fails: Callable[[Scenario], bool], large: Scenario = LARGE) -> Scenario:
    assert fails(large)
    small = shrink(large, fails)
    assert fails(small)
    assert check(small) == small
    assert scenario_from_json(scenario_to_json(small)) == small
    return small


def test_what_always_fails_becomes_one_row_in_one_step() -> None:
    small = minimal(lambda scenario: True)
    assert small == Scenario(
        config=Config(worker="MTPEagleWorker", max_draft_len=1),
        steps=(Step(phase=Phase.CAPTURE, draft_len=0, generations=(Generation(request=None),)),),
    )


def test_a_request_that_verifies_drafts_needs_its_prompt() -> None:
    small = minimal(steps(lambda step: any(row.agree == 2 for row in step.generations)))
    assert small == Scenario(
        config=Config(worker="MTPEagleWorker", max_draft_len=2),
        requests=(Request(id=0, prompt_len=1),),
        steps=(
            Step(draft_len=0, contexts=(Context(request=0, chunk=1),)),
            Step(draft_len=2, generations=(Generation(request=0, agree=2),)),
        ),
    )


def test_a_step_that_fails_for_its_lengths_alone_stands_alone() -> None:
    def fails(scenario: Scenario) -> bool:
        return any(plan.past >= 8 and plan.accepted == 3 for _, plans in walk(scenario) for plan in plans)

    scenario = Scenario(
        config=Config(worker="MTPEagleWorker", max_draft_len=2),
        requests=(Request(id=0, prompt_len=5),),
        steps=(
            Step(draft_len=2, contexts=(Context(request=0, chunk=5, agree=2),)),
            Step(draft_len=2, generations=(Generation(request=0, agree=2),)),
            Step(draft_len=2, generations=(Generation(request=0, agree=2),)),
        ),
    )
    small = shrink(check(scenario), fails)
    assert not small.requests
    assert [step.generations for step in small.steps] == [(Generation(request=None, past=8, accept=3),)]


def test_a_fault_keeps_its_place_and_loses_its_occurrence() -> None:
    small = minimal(steps(lambda step: step.fault is not None))
    (step,) = small.steps
    assert step.fault == Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.OOM)
    assert step.draft_len == 0
    assert step.contexts == (Context(request=None, chunk=1),)


def test_a_fault_that_is_not_needed_goes() -> None:
    small = minimal(steps(lambda step: step.phase is Phase.WARMUP and step.draft_len >= 5))
    assert small.steps == (Step(phase=Phase.WARMUP, draft_len=5, contexts=(Context(request=None, chunk=1),)),)
    assert small.config.max_draft_len == 5


def test_a_replay_keeps_its_capture_or_becomes_eager() -> None:
    small = minimal(steps(lambda step: step.phase is Phase.REPLAY))
    assert [step.phase for step in small.steps] == [Phase.CAPTURE, Phase.EAGER, Phase.REPLAY]
    assert all(len(step.rows) == 1 for step in small.steps)
    eager = minimal(steps(lambda step: len(step.generations) == 2 and not step.phase.is_startup))
    assert [step.phase for step in eager.steps] == [Phase.EAGER, Phase.EAGER]


def test_chunks_of_a_prompt_stay_as_long_as_they_are_needed() -> None:
    def unfinished(scenario: Scenario) -> bool:
        lengths = {request.id: request.prompt_len for request in scenario.requests}
        return any(
            row.is_context and row.request is not None and row.past + row.query < lengths[row.request]
            for _, rows in walk(scenario)
            for row in rows
        )

    small = minimal(unfinished)
    assert small.requests == (Request(id=0, prompt_len=2),)
    assert small.steps == (Step(draft_len=0, contexts=(Context(request=0, chunk=1),)),)


def test_the_end_of_a_request_and_a_configuration_stay_if_they_are_needed() -> None:
    small = minimal(lambda s: any(step.finish for step in s.steps) and s.config.seed > 0 and s.config.num_blocks > 64)
    assert small.requests == (Request(id=0, prompt_len=1),)
    assert [step.finish for step in small.steps] == [(), (0,)]
    assert small.config == Config(worker="MTPEagleWorker", max_draft_len=1, num_blocks=99, seed=5)


def test_a_parallel_drafter_keeps_its_least_draft_length() -> None:
    large = replace(LARGE, config=replace(LARGE.config, worker="PARDWorker"))
    small = minimal(steps(lambda step: bool(step.contexts) and not step.phase.is_startup), _pard(large))
    assert small.steps == (Step(draft_len=1, contexts=(Context(request=0, chunk=1),)),)


def _pard(scenario: Scenario) -> Scenario:
    """With agreements that PARD can have."""
    repaired = repair(scenario)
    assert repaired is not None
    return repaired


def test_a_failing_step_ends_what_follows_only_if_it_must() -> None:
    fatal = replace(LARGE.steps[1], fault=Fault(site="x", occurrence=1, kind=FaultKind.ERROR))
    repaired = repair(replace(LARGE, steps=(LARGE.steps[0], fatal, *LARGE.steps[2:])))
    assert repaired is not None
    assert len(repaired.steps) == 2


def test_nothing_left_is_nothing() -> None:
    assert repair(replace(LARGE, steps=())) is None
    assert repair(replace(LARGE, config=replace(LARGE.config, max_draft_len=0))) is None


def test_a_valid_scenario_needs_no_repair() -> None:
    assert repair(LARGE) == LARGE
    assert repair(MIXED) == MIXED


def test_runs_and_time_are_limited() -> None:
    runs = 0

    def fails(scenario: Scenario) -> bool:
        nonlocal runs
        runs += 1
        return False

    assert shrink(LARGE, fails, runs=7) == LARGE
    assert runs == 7
    assert shrink(LARGE, fails, seconds=0.0) == LARGE
    assert runs == 7


def test_a_few_dozen_runs_are_enough() -> None:
    runs = 0

    def fails(scenario: Scenario) -> bool:
        nonlocal runs
        runs += 1
        return steps(lambda step: step.fault is not None, lambda step: any(row.agree == 2 for row in step.rows))(
            scenario
        )

    small = shrink(LARGE, fails)
    assert len(small.steps) == 2 + 1
    assert runs < 60


def test_what_prompts_share_stays_as_far_as_it_is_needed() -> None:
    def fill(request: int, chunk: int) -> Step:
        return Step(draft_len=3, contexts=(Context(request=request, chunk=chunk, agree=2),))

    prompts = ((7, 20, None, 0), (3, 30, 7, 20), (5, 30, 7, 19))
    requests = tuple(Request(id=i, prompt_len=n, prefix_of=of, prefix_len=k) for i, n, of, k in prompts)
    steps = (fill(7, 20), fill(3, 30), fill(5, 30))
    config = replace(LARGE.config, enable_block_reuse=True, tokens_per_block=4)
    small = shrink(
        check(replace(LARGE, config=config, requests=requests, steps=steps)),
        lambda scenario: any(row.reused for _, rows in walk(scenario) for row in rows),
    )
    (first, second) = small.requests
    assert (first, second.id, second.prefix_of, len(small.steps)) == (Request(id=0, prompt_len=5), 1, 0, 2)
    # Both have one page and the token behind it.
    assert (second.prompt_len, second.prefix_len, small.steps[1].contexts[0].chunk) == (5, 5, 5)


@settings(max_examples=25)
@given(scenarios(variants=VARIANTS))
def test_whatever_is_drawn_shrinks_to_the_least(scenario: Scenario) -> None:
    began = time.monotonic()
    small = shrink(scenario, lambda candidate: True)
    assert size(small) <= size(scenario)
    assert len(small.steps) == len(small.steps[0].rows) == 1
    tree = {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 1} if scenario.config.traits.tree else {}
    assert small.config == Config(worker=scenario.config.worker, max_draft_len=1, **tree)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("needs", "left"),
    [
        (lambda config: True, {}),
        (lambda config: config.index_topk, {"attention_backend": "DSA", "index_topk": 2}),
        (
            lambda config: config.compress_ratios,
            {"attention_backend": "DEEPSEEK_V4", "index_topk": 2, "window_size": 1, "compress_ratios": (1, 2)},
        ),
        (
            lambda config: len(config.compress_ratios) > 2,
            {"attention_backend": "DEEPSEEK_V4", "index_topk": 2, "window_size": 1, "compress_ratios": (1, 2, 4)},
        ),
    ],
)
def test_compression_goes_where_it_is_not_needed(needs: Callable[[Config], bool], left: dict[str, Any]) -> None:
    smallest = shrink(compressed("Eagle3OneModelWorker"), lambda scenario: bool(needs(scenario.config)))
    assert smallest.config == Config(worker="Eagle3OneModelWorker", max_draft_len=1, **left)


@pytest.mark.parametrize("index", range(len(LARGE.steps)))
def test_any_step_can_be_dropped(index: int) -> None:
    repaired = repair(replace(LARGE, steps=LARGE.steps[:index] + LARGE.steps[index + 1 :]))
    assert repaired is not None
    assert len(repaired.steps) >= 3


def test_a_replay_without_its_capture_is_run_eagerly() -> None:
    repaired = repair(replace(LARGE, steps=LARGE.steps[1:]))
    assert repaired is not None
    assert [step.phase for step in repaired.steps] == [Phase.WARMUP] + [Phase.EAGER] * 4
    assert [len(step.rows) for step in repaired.steps] == [len(step.rows) for step in LARGE.steps[1:]]


def test_every_variant_has_less_to_read() -> None:
    tried: list[Scenario] = []
    shrink(LARGE, lambda candidate: bool(tried.append(candidate)))  # type: ignore[func-returns-value]
    assert len(tried) > 50
    assert all(size(candidate) < size(LARGE) for candidate in tried)
