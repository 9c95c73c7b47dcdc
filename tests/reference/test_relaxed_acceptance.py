"""Relaxed acceptance: while a request thinks, the target's second choice is as good as its first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference import trace
from scenarios import WORKERS, Config, Context, Generation, Request, Scenario, ScenarioError, Step, StepTrace, check
from scenarios.tracer import BEGIN_THINKING_TOKEN, choose, entry, near, prompt, term
from tests.reference.cases import ALL, DRAFT_TARGET, EAGLE3, MTP, MTP_EAGLE, at, configuration

RELAXED = [worker for worker in ALL if WORKERS[worker].relaxed_acceptance]


def _config(worker: str, *, topk: int = 2, delta: float = 0.5) -> Config:
    asked = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": topk, "relaxed_delta": delta}
    return replace(configuration(worker, 3), **asked)


def _run(config: Config, *steps: Step) -> tuple[StepTrace, ...]:
    """A prompt of 5 that thinks and one of 7 that does not, drafts one that agrees and two close ones; these steps."""
    requests = (Request(id=0, prompt_len=5, thinking=True), Request(id=1, prompt_len=7))
    rows = tuple(Context(request=r.id, chunk=r.prompt_len, agree=1, near=2) for r in requests)
    scenario = Scenario(config=config, requests=requests, steps=(Step(draft_len=3, contexts=rows), *steps))
    return trace(check(scenario)).steps


def _decode(draft_len: int, near_: int = 0) -> Step:
    return Step(draft_len=draft_len, generations=(Generation(request=1, near=near_), Generation(request=0, near=near_)))


def _choices(request: int, emitted: list[int]) -> list[int]:
    """What the target would choose for each of the tokens that a request has emitted."""
    tokens = prompt(0, request, (5, 7)[request], thinking=not request)
    choices = []
    for token in emitted:
        choices.append(choose(sum(term(n, entry(n, said)) for n, said in enumerate(tokens))))
        tokens.append(token)
    return choices


@pytest.mark.parametrize("worker", RELAXED)
def test_a_request_that_thinks_goes_on_from_second_choices(worker: str) -> None:
    _, step, after = _run(_config(worker), _decode(3, 3), _decode(3))
    assert at(step, "verified")["num_accepted_tokens"] == [2, 4]
    assert at(after, "verified")["num_accepted_tokens"] == [1, 4]
    emitted = at(after, "updated")["emitted"]
    assert emitted[1] == _choices(1, emitted[1])
    choices = _choices(0, emitted[0])
    second = [0, 0, 1, 1, 0, 1, 1, 1, 0]
    assert emitted[0] == [near(token) if close else token for token, close in zip(choices, second, strict=True)]
    cached = prompt(0, 0, 5, True) + emitted[0][:-1]
    assert at(after, "updated")["target_kv"][0] == [entry(n, token) for n, token in enumerate(cached)]
    assert cached[4] == BEGIN_THINKING_TOKEN


@pytest.mark.parametrize(("topk", "delta"), [(1, 0.5), (2, 0.125)])
def test_a_choice_too_few_or_too_far_off_is_not_accepted(topk: int, delta: float) -> None:
    _, step, after = _run(_config(EAGLE3, topk=topk, delta=delta), _decode(3, 3), _decode(3))
    assert [at(s, "verified")["num_accepted_tokens"] for s in (step, after)] == [[2, 2], [1, 1]]
    emitted = at(after, "updated")["emitted"][0]
    assert emitted == _choices(0, emitted)
    assert at(after, "updated")["relaxed_delta"] == {0: delta, 1: 0}


@pytest.mark.parametrize("worker", [EAGLE3, MTP_EAGLE])
def test_rows_of_the_first_draft_call_hold_ones_behind_what_is_accepted(worker: str) -> None:
    _, step = _run(_config(worker), _decode(3, 3))
    (two, four), ids = at(step, "verified")["accepted_tokens"], at(step, "draft[0]")["input_ids"]
    assert ids == [*two, 1, 1, *four]


def test_the_delta_is_there_from_the_chunk_that_ends_the_prompt() -> None:
    requests = (Request(id=0, prompt_len=5, thinking=True),)
    steps = tuple(Step(draft_len=0, contexts=(Context(request=0, chunk=chunk),)) for chunk in (3, 2))
    taken = trace(check(Scenario(config=_config(EAGLE3), requests=requests, steps=steps))).steps
    assert [at(step, "updated")["relaxed_delta"] for step in taken] == [{0: 0}, {0: 0.5}]
    assert [at(step, "updated")["relaxed_delta_left"] for step in taken] == [[], []]


def test_other_workers_and_too_many_drafts_are_refused() -> None:
    with pytest.raises(ScenarioError, match="first choice"):
        _run(_config(DRAFT_TARGET))
    with pytest.raises(ScenarioError, match=r"generations\[0\]\.near"):
        _run(_config(MTP), _decode(3, 4))
