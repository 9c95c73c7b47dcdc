"""Forced acceptance: counts that a benchmark asks for, of drafts that the target would have taken anyway."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from reference import trace
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
    StepTrace,
    check,
)
from scenarios.forced_acceptance import counts
from scenarios.tracer import prompt_token
from tests.reference.cases import ALL, EAGLE3, LINEAR, PARD, at, configuration, last_step
from tests.reference.test_oracle_properties import greedy

FORCED = [worker for worker in ALL if WORKERS[worker].drafts_for_contexts]
COUNTER = "force_accept_counter"


def _forced(worker: str, force: float) -> Config:
    return replace(configuration(worker, 3), force_num_accepted_tokens=force)


def _decode(draft_len: int, *requests: int, phase: Phase = Phase.EAGER, fault: Fault | None = None) -> Step:
    rows = tuple(Generation(request=i, agree=draft_len) for i in requests)
    return Step(phase=phase, draft_len=draft_len, generations=rows, fault=fault)


def _run(worker: str, force: float, *steps: Step, startup: tuple[Step, ...] = ()) -> tuple[StepTrace, ...]:
    """A prompt of 5 and one of 7 with drafts that all agree, then these steps."""
    config = _forced(worker, force)
    requests = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=7))
    prompts = Step(draft_len=3, contexts=tuple(Context(request=r.id, chunk=r.prompt_len, agree=3) for r in requests))
    scenario = check(Scenario(config=config, requests=requests, steps=(*startup, prompts, *steps)))
    taken = trace(scenario).steps
    for i, emitted in at(taken[-1], "updated")["emitted"].items():
        prompt = [prompt_token(0, i, n) for n in range(requests[i].prompt_len)]
        assert emitted == list(islice(greedy(prompt, 0), len(emitted)))
    return taken[len(startup) + 1 :]


@pytest.mark.parametrize("worker", FORCED)
@pytest.mark.parametrize(("force", "count"), [(1.0, 2), (2.0, 3), (3.0, 4), (9.5, 4)])
def test_a_generation_accepts_the_forced_drafts_and_one_token(worker: str, force: float, count: int) -> None:
    for step in _run(worker, force, _decode(3, 0, 1), _decode(3, 1), _decode(3, 1, 0)):
        rows = len(step.substeps[0]["request_ids"])
        assert at(step, "verified")["num_accepted_tokens"] == at(step, "restored")["new_tokens_lens"] == [count] * rows
        assert set(at(step, "updated")["py_rewind_len"].values()) == {4 - count}


def test_lengths_go_on_from_what_is_accepted() -> None:
    (step,) = _run(EAGLE3, 1.0, _decode(3, 0, 1))
    assert [s["kv_lens_cuda"] for s in step.named("prepared", "draft", "restored")] == [
        [9, 11], [9, 11], [8, 10], [9, 11], [10, 12],
    ]  # fmt: skip
    accepted = at(step, "verified")["accepted_tokens"]
    assert at(step, "restored")["next_new_tokens"][0][0] == accepted[0][1]


def test_a_fraction_is_drawn_for_each_row_of_each_forward() -> None:
    steps = _run(EAGLE3, 1.5, *[_decode(3, 0, 1)] * 4)
    # The prompts' forward was the first to draw, though it has no generation.
    expected = [counts(1.5, 3, counter, 2) for counter in (2, 3, 4, 5)]
    assert [at(step, "verified")["num_accepted_tokens"] for step in steps] == expected
    assert len({tuple(row) for row in expected}) > 1
    assert [(at(s, "entered")[COUNTER], at(s, "restored")[COUNTER]) for s in steps] == [(1, 2), (2, 3), (3, 4), (4, 5)]


def test_without_a_choice_nothing_is_drawn() -> None:
    """Neither where all K drafts are accepted anyway, nor without drafts."""
    steps = _run(EAGLE3, 2.6, _decode(2, 0, 1), _decode(0, 0), _decode(0, 1))
    assert [at(step, "restored")[COUNTER] for step in steps] == [1, 1, 1]
    assert [at(step, "restored")["new_tokens_lens"] for step in steps] == [[3, 3], [1], [1]]
    (step,) = _run(EAGLE3, 2.0, _decode(3, 0, 1))
    assert COUNTER not in at(step, "restored")


@pytest.mark.parametrize("worker", LINEAR)
def test_warm_up_of_a_graph_accepts_what_is_sampled(worker: str) -> None:
    dummies = (Generation(request=None, past=4, accept=4), Generation(request=None, past=6, accept=3))
    capture = Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies)
    config = _forced(worker, 1.5)
    taken = last_step(config, (), capture)
    assert [at(taken, "verified", run)["num_accepted_tokens"] for run in range(3)] == [
        [4, 3], [4, 3], counts(1.5, 3, 1, 2),
    ]  # fmt: skip
    assert [s[COUNTER] for s in taken.named("entered", "restored")] == [0, 0, 0, 0, 0, 1]
    replay = _decode(3, 0, 1, phase=Phase.REPLAY)
    (step,) = _run(worker, 1.5, replay, startup=(capture,))
    assert at(step, "restored")["new_tokens_lens"] == counts(1.5, 3, 3, 2)
    assert (at(step, "entered")[COUNTER], at(step, "restored")[COUNTER]) == (2, 3)


def test_how_far_a_failed_step_drew_is_left_open() -> None:
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    config = _forced(EAGLE3, 1.5)
    requests = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=7))
    failing = Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=3),), fault=fault)
    after = Step(draft_len=0, contexts=(Context(request=1, chunk=7),))
    step = last_step(config, requests, failing, after)
    assert COUNTER not in at(step, "entered")
    with pytest.raises(ScenarioError, match="earlier fault struck"):
        last_step(config, requests, failing, Step(draft_len=3, contexts=(Context(request=1, chunk=7),)))


def test_none_is_given_a_draft_that_the_target_disagrees_with() -> None:
    disagreed = Step(draft_len=3, generations=(Generation(request=0, agree=1), Generation(request=1, agree=3)))
    with pytest.raises(ScenarioError, match=r"steps\[2\]\.generations\[0\]"):
        _run(EAGLE3, 2.0, disagreed, _decode(3, 0, 1))
    with pytest.raises(ScenarioError, match="force_num_accepted_tokens"):
        check(Scenario(config=_forced(PARD, 1.0), steps=(_decode(3, 0),)))
