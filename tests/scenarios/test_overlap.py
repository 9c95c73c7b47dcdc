"""The overlap scheduler in a scenario: lengths that lag, wasted rows, idle iterations, and what each error says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Schedule,
    Step,
    check,
    dumps,
    kept_in_step,
    loads,
    walk,
)

CONFIG = Config(worker="Eagle3OneModelWorker", max_draft_len=3, overlap=True)
PROMPT = Step(draft_len=1, contexts=(Context(request=0, chunk=5, agree=1),))
NEXT = Step(draft_len=3, generations=(Generation(request=0, agree=2),))
LAST = replace(NEXT, finish=(0,))
IDLE = Step(draft_len=3)
FAULT = Fault(site="model.forward", occurrence=1, kind=FaultKind.ERROR)


def scenario(*steps: Step, config: Config = CONFIG) -> Scenario:
    return Scenario(config=config, requests=(Request(id=0, prompt_len=5),), steps=steps)


def test_the_host_counts_what_is_in_flight_and_gives_it_back_a_step_later() -> None:
    plans = [rows[0] for _, rows in walk(scenario(PROMPT, NEXT, LAST, NEXT))]
    assert [plan.past for plan in plans] == [0, 5, 7, 10]
    # All rows of the step in flight, 2 of the prompt's and 4 of a generation's, and the token before them.
    assert [plan.host_past for plan in plans] == [0, 4 + 2, 5 + 4, 7 + 4]
    # Room for the longest drafts, then 4 tokens each; of the second step 2 come back while the third is in flight.
    assert [plan.granted for plan in plans] == [10, 14, 18, 18 - 2 + 4]
    assert [plan.wasted for plan in plans] == [False, False, False, True]


def test_an_idle_iteration_leaves_nothing_in_flight() -> None:
    case = check(scenario(PROMPT, NEXT, IDLE, NEXT))
    assert loads(dumps(case)) == case
    last = [rows for _, rows in walk(case)][-1][0]
    assert last.past == last.host_past == 7
    assert last.granted == 14 - 2 + 4


def test_a_request_that_ends_keeps_its_pages_until_its_last_step_is_processed() -> None:
    schedule = Schedule(CONFIG, (Request(id=0, prompt_len=5),))
    held = []
    for step in (PROMPT, LAST, IDLE):
        schedule.advance(step)
        held.append(schedule.blocks_in_use)
    assert held == [(3,), (4,), (0,)]


def test_a_failure_takes_what_is_in_flight_along() -> None:
    schedule = Schedule(CONFIG, (Request(id=0, prompt_len=5),))
    schedule.advance(PROMPT)
    schedule.advance(replace(NEXT, fault=FAULT))
    assert not schedule.in_flight
    assert not schedule.generating
    with pytest.raises(ScenarioError, match=r"^step: the batch is empty and no step is in flight"):
        schedule.advance(IDLE)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((IDLE, PROMPT), "steps[0]: the batch is empty and no step is in flight; add a context"),
        ((PROMPT, IDLE, IDLE), "steps[2]: the batch is empty and no step is in flight; add a context"),
        ((PROMPT, replace(IDLE, phase=Phase.REPLAY)), "steps[1].phase: is replay in a step without rows; leave it"),
        ((PROMPT, replace(IDLE, finish=(0,))), "steps[1].finish: nothing runs in a step without rows; write it in"),
        ((PROMPT, replace(IDLE, fault=FAULT)), "steps[1].fault: nothing runs in a step without rows; remove it"),
        ((PROMPT, LAST, NEXT, NEXT), "steps[3].generations[0].request: request 0 has ended before this step"),
        ((PROMPT, LAST, LAST), "steps[2].finish[0]: request 0 is not active; name a request"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        check(scenario(*steps))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"worker": "SAWorker", "attention_backend": "VANILLA", "tokens_per_block": 256},
            "config.overlap: is not combined with VANILLA, where no KV length is corrected on the device; leave one",
        ),
        # One token more than the true length is too much.
        ({"max_seq_len": 6 + 4 + 1}, "steps[1].generations[0]: its KV length 12 (extra tokens included) exceeds"),
    ],
)
def test_what_overlap_does_not_fit_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        check(scenario(PROMPT, NEXT, config=replace(CONFIG, **change)))
    assert str(refused.value).startswith(message)


def test_without_overlap_there_is_nothing_in_flight() -> None:
    off = replace(CONFIG, overlap=False)
    assert "overlap" not in dumps(scenario(PROMPT, config=off))
    with pytest.raises(ScenarioError, match=r"^steps\[1\]: the batch is empty; add a context"):
        check(scenario(PROMPT, IDLE, config=off))
    assert [rows[0].ahead for _, rows in walk(scenario(PROMPT, NEXT, config=off))] == [0, 0]


RANKS = replace(CONFIG, attention_dp_size=2)
BUSY = (Peer(generations=1),)


def test_all_ranks_may_be_idle_while_a_step_is_in_flight() -> None:
    check(scenario(replace(PROMPT, peers=BUSY), IDLE, replace(NEXT, peers=BUSY), config=RANKS))
    with pytest.raises(ScenarioError, match=r"^steps\[1\].peers: has 1 entries, not 0: no rank runs anything"):
        check(scenario(replace(PROMPT, peers=BUSY), replace(IDLE, peers=BUSY), config=RANKS))
    with pytest.raises(ScenarioError, match=r"^steps\[0\]: the batch is empty and no step is in flight"):
        check(scenario(IDLE, config=RANKS))


def test_a_dummy_is_of_its_step_alone() -> None:
    """Another rank runs on, so this one does: it has nothing in flight that the host would have to suppose."""
    idle = kept_in_step(RANKS, replace(IDLE, peers=BUSY))
    plans = [rows[-1] for _, rows in walk(scenario(replace(PROMPT, peers=BUSY), idle, idle, config=RANKS))]
    assert [(plan.past, plan.ahead) for plan in plans[1:]] == [(0, 0)] * 2


def test_where_nothing_runs_nothing_is_drawn_by_force() -> None:
    schedule = Schedule(replace(CONFIG, force_num_accepted_tokens=0.5), (Request(id=0, prompt_len=5),))
    counters = [(schedule.advance(step), schedule.counter)[1] for step in (PROMPT, IDLE, NEXT)]
    assert counters == [1, 1, 2]
