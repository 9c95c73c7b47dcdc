"""Guided decoding: a grammar masks what the target chooses, and what a drafter drafts where the worker lets it."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest

from reference import trace
from scenarios import (
    WORKERS,
    Config,
    Context,
    Generation,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Step,
    StepTrace,
    check,
)
from scenarios.tracer import GRAMMAR_START, choose, entry, grammar_allows, grammar_state, guided, prompt, term
from tests.reference.cases import ALL, EAGLE3, PARD, SA, at, configuration

GUIDED = [worker for worker in ALL if not WORKERS[worker].tree]
DRAFTING = [worker for worker in GUIDED if WORKERS[worker].guides_drafts]
PROMPTS = {0: 5, 1: 7}


def _config(worker: str) -> Config:
    return replace(configuration(worker, 3), guided_decoding=True)


def _matcher(tokens: list[int]) -> list[int]:
    return [len(tokens), reduce(grammar_state, tokens, GRAMMAR_START)]


def _text(request: int, count: int) -> list[int]:
    """What a request says, each token from the sum over all before it and the state after those generated."""
    tokens = prompt(0, request, PROMPTS[request])
    for _ in range(count):
        digest = sum(term(n, entry(n, token)) for n, token in enumerate(tokens))
        state = reduce(grammar_state, tokens[PROMPTS[request] :], GRAMMAR_START)
        tokens.append(guided(choose(digest), state))
    return tokens[PROMPTS[request] :]


def _run(worker: str, *steps: Step) -> tuple[StepTrace, ...]:
    """Both prompts with drafts that agree as far as they can, then these steps."""
    config = _config(worker)
    agree = 3 if config.traits.guides_drafts else 0
    requests = tuple(Request(id=i, prompt_len=n) for i, n in PROMPTS.items())
    prompts = Step(draft_len=3, contexts=tuple(Context(request=i, chunk=n, agree=agree) for i, n in PROMPTS.items()))
    return trace(check(Scenario(config=config, requests=requests, steps=(prompts, *steps)))).steps


def _decode(draft_len: int, *agree: int, phase: Phase = Phase.EAGER) -> Step:
    rows = tuple(Generation(request=i, agree=count) for i, count in enumerate(agree))
    return Step(phase=phase, draft_len=draft_len, generations=rows)


@pytest.mark.parametrize("worker", GUIDED)
def test_output_is_guided_decoding_of_the_prompt_whatever_is_drafted(worker: str) -> None:
    few = 2 if worker in DRAFTING else 0
    shortest = _config(worker).min_draft_len
    for step in _run(worker, _decode(3, few, 0), _decode(shortest, 0, 0), _decode(3, 0, few), _decode(3, 0, 0)):
        for request, emitted in at(step, "updated")["emitted"].items():
            assert emitted == _text(request, len(emitted))
            assert at(step, "updated")["matchers"][request] == _matcher(emitted[:-1])
            states = [reduce(grammar_state, emitted[:n], GRAMMAR_START) for n in range(len(emitted))]
            assert all(map(grammar_allows, states, emitted))


@pytest.mark.parametrize("worker", DRAFTING)
def test_drafts_are_masked_so_that_they_agree_or_do_not(worker: str) -> None:
    step = _run(worker, _decode(3, 2, 0), _decode(3, 0, 0))[2]
    assert at(step, "verified")["num_accepted_tokens"] == [3, 1]
    emitted = [at(step, "updated")["emitted"][i] for i in (0, 1)]
    drafts = at(step, "restored")["next_draft_tokens"]
    for text, made in zip(emitted, drafts, strict=True):
        states = [reduce(grammar_state, [*text, *made[:n]], GRAMMAR_START) for n in range(3)]
        assert all(map(grammar_allows, states, made))
        assert made[0] != _text(emitted.index(text), len(text) + 1)[-1]


def test_matchers_advance_with_what_is_fed_and_are_put_back() -> None:
    prompts, _, step = _run(EAGLE3, _decode(3, 1, 0), _decode(3, 0, 3))
    assert at(prompts, "draft[2]")["matcher_rows"][0][0] == 2
    assert at(prompts, "restored")["matcher_rows"] == at(prompts, "entered")["matcher_rows"] == [[0, 0], [0, 0]]
    before, drafts = at(step, "entered")["matcher_rows"], at(step, "restored")["next_draft_tokens"]
    fed = at(step, "prepared")["input_ids"]
    text = at(step, "updated")["emitted"]
    assert before == [_matcher(_text(0, 4)), _matcher(_text(1, 4))]
    read = [_matcher(_text(i, 4) + fed[4 * i : 4 * i + 4]) for i in (0, 1)]
    assert at(step, "verified")["matcher_rows"] == at(step, "draft[0]")["matcher_rows"] == read
    assert at(step, "draft[1]")["matcher_rows"] == [_matcher(text[0]), _matcher(text[1])]
    assert at(step, "draft[2]")["matcher_rows"] == [_matcher([*text[i], drafts[i][0]]) for i in (0, 1)]
    assert at(step, "restored")["matcher_rows"] == [_matcher(text[0][:-1]), _matcher(text[1][:-1])]


@pytest.mark.parametrize("worker", [EAGLE3, PARD, SA])
def test_the_middle_of_a_prompt_and_dummies_have_no_matcher(worker: str) -> None:
    capture = Step(phase=Phase.CAPTURE, draft_len=3, generations=(Generation(request=None, past=4, accept=4),))
    chunk = Step(draft_len=3, contexts=(Context(request=0, chunk=2),))
    scenario = Scenario(config=_config(worker), requests=(Request(id=0, prompt_len=5),), steps=(capture, chunk))
    started, step = trace(check(scenario)).steps
    assert at(started, "verified", 2)["matcher_rows"] == [None]
    assert at(started, "verified", 2)["num_accepted_tokens"] == [4]
    assert at(started, "updated")["matchers"] == {}
    assert at(step, "verified")["matcher_rows"] == [None]
    assert at(step, "updated")["matchers"] == {0: [0, GRAMMAR_START]}


def test_drafts_that_no_grammar_masks_agree_with_nothing() -> None:
    with pytest.raises(ScenarioError, match="without the grammar"):
        _run(PARD, _decode(3, 1, 0))
