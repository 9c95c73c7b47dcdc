"""Variants of drafting in the vocabulary: who may ask for them, and what forced acceptance does to lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scenarios import (
    WORKERS,
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Step,
    check,
    dumps,
    loads,
    walk,
)
from scenarios import forced_acceptance as forced
from scenarios.limits import check_config
from scenarios.tracer import VOCAB_SIZE, d2t, draft_id

FORCED = Config(worker="Eagle3OneModelWorker", max_draft_len=3, force_num_accepted_tokens=1.5)
START = Step(draft_len=3, contexts=(Context(request=0, chunk=4, agree=3),))
STEP = Step(draft_len=3, generations=(Generation(request=0, agree=3),))
FAULT = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.ERROR)


def story(*steps: Step, **options: object) -> Scenario:
    return Scenario(
        config=replace(FORCED, **options),  # type: ignore[arg-type]
        requests=(Request(id=0, prompt_len=4), Request(id=1, prompt_len=4)),
        steps=steps,
    )


def test_a_fraction_decides_anew_in_each_forward_that_draws() -> None:
    warm_up = Step(phase=Phase.WARMUP, draft_len=3, generations=(Generation(request=None, accept=4),))
    capture = replace(warm_up, phase=Phase.CAPTURE)
    last = replace(STEP, draft_len=1, generations=(Generation(request=0, agree=1),))
    steps = (warm_up, capture, START, *(STEP for _ in range(5)), last)
    accepted = [[r.accepted for r in rows if not r.is_context] for _, rows in walk(story(*steps))]
    # The forward of a context draws as well; the one with a single draft accepts it in any case.
    draws = [forced.counts(1.5, 3, counter, 1) for counter in range(1, 9)]
    assert accepted == [*draws[:2], [], *draws[3:], [2]]
    assert {2, 3} == {n for row in accepted for n in row}


def test_lengths_follow_what_is_forced() -> None:
    rows = [plan for _, plan in walk(story(START, STEP, STEP, force_num_accepted_tokens=1.0))]
    assert [(r.past, r.accepted) for plan in rows[1:] for r in plan] == [(4, 2), (6, 2)]


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        ((START,), {"force_num_accepted_tokens": float("nan")}, "force_num_accepted_tokens: nan is too small"),
        ((START,), {"force_num_accepted_tokens": 33.0}, "write at most 32"),
        ((START,), {"worker": "PARDWorker"}, "config.force_num_accepted_tokens: PARDWorker drafts nothing for a"),
        ((START,), {"worker": "MTPEagleWorker", "draft_vocab_map": True}, "config.draft_vocab_map: MTPEagleWorker"),
        ((START,), {"worker": "SAWorker", "sa_threshold": 1}, "config.sa_threshold: SAWorker has no suffix automaton"),
        (
            (START, replace(STEP, generations=(Generation(request=0, match=1),))),
            {},
            r"steps\[1\].generations\[0\].match: 1 is outside 0..0; leave it out",
        ),
        (
            (START, replace(STEP, generations=(Generation(request=0, match=129),))),
            {"sa_threshold": 1},
            r"match: 129 is outside 0..128; write how many tokens the match has",
        ),
        (
            (Step(phase=Phase.WARMUP, draft_len=3, generations=(Generation(request=None, match=1),)),),
            {"sa_threshold": 1},
            r"match: 1 is outside 0..0; leave it out, as it is for real requests",
        ),
        (
            (replace(START, contexts=(Context(request=0, chunk=4, agree=1),)), STEP),
            {},
            r"steps\[1\].generations\[0\]: the target agrees with 1 of its drafts, and 2 may be accepted by",
        ),
        (
            (Step(phase=Phase.WARMUP, draft_len=3, generations=(Generation(request=None, accept=2),)),),
            {},
            "write accept of 3 or more",
        ),
        (
            (replace(START, fault=FAULT), replace(START, contexts=(Context(request=1, chunk=4),))),
            {},
            r"steps\[1\]: where the earlier fault struck decides",
        ),
    ],
)
def test_what_cannot_be_is_refused(steps: tuple[Step, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        check(story(*steps, **options))


def test_a_failure_that_drew_nothing_is_followed_by_others() -> None:
    later = replace(START, contexts=(Context(request=1, chunk=4),))
    check(story(replace(START, fault=FAULT), later, force_num_accepted_tokens=2.0))


def test_a_whole_number_is_a_number() -> None:
    text = dumps(story(START, force_num_accepted_tokens=2.0)).replace("2.0", "2")
    force = loads(text).config.force_num_accepted_tokens
    assert (force, type(force)) == (2.0, float)
    assert "force" not in dumps(story(START, force_num_accepted_tokens=0.0))


def test_a_draft_vocabulary_is_mapped_back_exactly_once() -> None:
    tokens = range(VOCAB_SIZE)
    drafts = [draft_id(t) for t in tokens]
    assert sorted(drafts) == list(tokens)
    assert all(d + d2t(d) == t for t, d in zip(tokens, drafts, strict=True))
    assert not any(d == t or t + d2t(t) == d for t, d in zip(tokens, drafts, strict=True))
    check_config(replace(FORCED, draft_vocab_map=True))
    assert [w for w, traits in WORKERS.items() if not traits.draft_vocab] == [
        "MTPEagleWorker",
        "MTPWorker",
        "SAWorker",
        "MTPEagleDynamicTreeWorker",
    ]
