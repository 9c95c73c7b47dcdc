"""Guided decoding and relaxed acceptance in the vocabulary: lengths that follow, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scenarios import Config, Context, Generation, Request, Scenario, ScenarioError, Step, check, dumps, loads, walk
from scenarios.tracer import BEGIN_THINKING_TOKEN, prompt, prompt_token

RELAXED = Config(
    worker="MTPEagleWorker",
    max_draft_len=3,
    use_relaxed_acceptance_for_thinking=True,
    relaxed_topk=2,
    relaxed_delta=0.5,
)
STEPS = (
    Step(draft_len=3, contexts=tuple(Context(request=i, chunk=4, agree=1, near=1) for i in (0, 1))),
    Step(draft_len=3, generations=(Generation(request=0, near=3), Generation(request=1, near=3))),
    Step(draft_len=2, generations=(Generation(request=0), Generation(request=1))),
)


def story(config: Config = RELAXED, steps: tuple[Step, ...] = STEPS, thinking: bool = True) -> Scenario:
    requests = (Request(id=0, prompt_len=4, thinking=thinking), Request(id=1, prompt_len=4))
    return Scenario(config=config, requests=requests, steps=steps)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({}, [[1, 1], [3, 2], [3, 1]]),
        ({"relaxed_topk": 1}, [[1, 1], [2, 2], [1, 1]]),
        ({"relaxed_delta": 0.2}, [[1, 1], [2, 2], [1, 1]]),
    ],
)
def test_only_requests_that_think_accept_what_is_close(options: dict[str, float], accepted: list[list[int]]) -> None:
    case = story(replace(RELAXED, **options))  # type: ignore[arg-type]
    assert [[plan.accepted for plan in plans] for _, plans in walk(case)] == accepted
    assert loads(dumps(case)) == case


def test_the_last_token_of_a_prompt_begins_to_think() -> None:
    assert prompt(3, 1, 2) == [prompt_token(3, 1, 0), prompt_token(3, 1, 1)]
    assert prompt(3, 1, 2, thinking=True) == [prompt_token(3, 1, 0), BEGIN_THINKING_TOKEN]


STRICT = Config(worker="MTPEagleWorker", max_draft_len=3)
GUIDED = replace(STRICT, guided_decoding=True)
ONE = Step(draft_len=3, contexts=(Context(request=1, chunk=4),))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            story(replace(RELAXED, worker="SAWorker")),
            "use_relaxed_acceptance_for_thinking: SAWorker accepts no",
        ),
        (story(replace(RELAXED, relaxed_topk=0)), "config.relaxed_topk: 0 does not fit .* true; write 1 or more"),
        (story(replace(STRICT, relaxed_delta=0.5), (ONE,), False), "config.relaxed_delta: is for use_relaxed"),
        (story(replace(RELAXED, relaxed_delta=0.255)), "config.relaxed_delta: 0.255 is .* too close"),
        (story(replace(RELAXED, relaxed_delta=0.7)), "config.relaxed_delta: 0.7 is not in 0..0.6"),
        (story(replace(RELAXED, force_num_accepted_tokens=1.0)), "config.force_num_accepted_tokens: is not combined"),
        (story(replace(RELAXED, guided_decoding=True)), "use_relaxed_acceptance_for_thinking: is not combined"),
        (story(STRICT, (ONE,)), "requests\\[0\\].thinking: is for config.use_relaxed"),
        (story(STRICT, STEPS, False), "contexts\\[0\\].near: 1 is not 0; leave it out"),
        (
            story(RELAXED, (replace(ONE, contexts=(Context(request=1, chunk=4, agree=2, near=2),)),)),
            "near: 2 is outside 0..1; write how many",
        ),
        (
            story(
                replace(GUIDED, worker="SAWorker"),
                (replace(ONE, contexts=(Context(request=1, chunk=4, agree=1),)),),
                False,
            ),
            "agree: 1 is too much, as SAWorker drafts without the grammar",
        ),
        (
            story(
                replace(
                    GUIDED,
                    worker="MTPEagleDynamicTreeWorker",
                    dynamic_tree_max_topK=2,
                    max_total_draft_tokens=4,
                )
            ),
            "config.guided_decoding: a matcher follows a chain of drafts, no tree",
        ),
    ],
)
def test_what_cannot_be(case: Scenario, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        check(case)
