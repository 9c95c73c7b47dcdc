"""What fails shrinks to what a person can read: few requests, few steps, nothing that is not needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st

from scenarios import Config, Context, Fault, FaultKind, Generation, Phase, Request, Scenario, Step
from strategies import faulted_scenarios, scenarios
from tests.strategies.stories import Situation, served, some

SMALL = Config(worker="Eagle3OneModelWorker", max_draft_len=1)
ONE = (Request(id=0, prompt_len=1),)


def record(scenario: Scenario) -> Mapping[str, int]:
    return {"target_model.forward": 1, "draft_model.forward": max(1, scenario.steps[-1].draft_len)}


CLEAN = scenarios()
FAULTED = faulted_scenarios(record=record)


def shrunk(
    strategy: st.SearchStrategy[Scenario], condition: Callable[[Scenario], bool], seed: int, *, examples: int = 2000
) -> Scenario:
    return find(
        strategy,
        condition,
        settings=settings(max_examples=examples, database=None, deadline=None),
        random=random.Random(seed),
    )


def told(situation: Situation) -> Callable[[Scenario], bool]:
    return lambda scenario: bool(situation(scenario, list(served(scenario))))


def test_the_simplest_generation() -> None:
    assert shrunk(CLEAN, told(some(lambda m: m.k and m.shape[1])), 0) == Scenario(
        config=SMALL,
        requests=ONE,
        steps=(
            Step(draft_len=1, contexts=(Context(request=0, chunk=1),)),
            Step(draft_len=1, generations=(Generation(request=0),)),
        ),
    )


@pytest.mark.parametrize("seed", [0])
def test_a_leak_after_a_failure_takes_two_requests_and_two_steps(seed: int) -> None:
    def leaks(scenario: Scenario) -> bool:
        """State that a failing draft call leaves behind, and that the next batch meets."""
        pairs = zip(scenario.steps, scenario.steps[1:], strict=False)
        return any(
            a.phase is Phase.EAGER and a.draft_len and a.fault and a.fault.site == "draft_model.forward" and b.rows
            for a, b in pairs
        )

    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.ERROR)
    found = shrunk(FAULTED, leaks, seed)
    assert found.requests == (*ONE, Request(id=1, prompt_len=1))
    assert [step.contexts for step in found.steps] == [(Context(request=i, chunk=1),) for i in (0, 1)]
    assert [step.fault for step in found.steps] == [fault, None]
    assert found.config.max_draft_len == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("situation", "steps"),
    [
        (some(lambda m: any(r.is_context and r.past and r.query == 1 for r in m.rows)), 2),
        (some(lambda m: m.step.phase is Phase.REPLAY), 3),
    ],
    ids=["a one-token tail", "a replay"],
)
def test_what_is_left_is_needed(situation: Situation, steps: int) -> None:
    found = shrunk(CLEAN, told(situation), 0)
    assert len(found.requests) <= 2
    assert len(found.steps) == steps
    assert found.config.max_draft_len == 1
    assert all(r.prompt_len < 10 for r in found.requests)
