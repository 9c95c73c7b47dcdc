"""Verify widths: which configurations may have them, what a row may say, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scenarios import (
    BACKENDS,
    WORKERS,
    Config,
    Context,
    Generation,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Step,
    walk,
)
from scenarios.limits import check_config
from scenarios.ragged import ragged_on

EAGLE = "Eagle3OneModelWorker"
CONFIG = Config(worker=EAGLE, max_draft_len=3, ragged_verify=True)
VIEW: dict[str, Any] = {"attention_backend": "FLASHINFER"}
THINKING: dict[str, Any] = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 2, "relaxed_delta": 0.5}
CAPTURE = Step(
    phase=Phase.CAPTURE,
    draft_len=3,
    generations=(Generation(request=None, past=3, verify=1), Generation(request=None, past=3, verify=2)),
)
PROMPTS = Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=3), Context(request=1, chunk=4, agree=3)))


def rows(*widths: int | None, draft_len: int = 3, phase: Phase = Phase.EAGER) -> Step:
    """A step in which requests 0, 1, ... verify these numbers of drafts."""
    generations = tuple(Generation(request=i, agree=draft_len, verify=width) for i, width in enumerate(widths))
    return Step(phase=phase, draft_len=draft_len, generations=generations)


def plans(*steps: Step, **changes: Any) -> list[Any]:
    requests = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=4))
    return [of for _, of in walk(Scenario(config=replace(CONFIG, **changes), requests=requests, steps=steps))]


@pytest.mark.parametrize(
    ("worker", "options", "message"),
    [
        ("PARDWorker", {}, "config.ragged_verify: PARDWorker verifies the same number of drafts"),
        (EAGLE, VIEW, "config.ragged_verify: is not combined with attention_backend FLASHINFER"),
        (EAGLE, {"guided_decoding": True}, "config.guided_decoding: is not combined with ragged_verify"),
        (EAGLE, {"force_num_accepted_tokens": 1.0}, "config.force_num_accepted_tokens: is not combined with ragged"),
        (EAGLE, {"sa_threshold": 2}, "config.sa_threshold: is not combined with ragged_verify"),
        (EAGLE, THINKING, "config.use_relaxed_acceptance_for_thinking: is not combined with ragged_verify"),
        (EAGLE, {"attention_dp_size": 2}, "config.attention_dp_size: 2 ranks are not combined with ragged_verify"),
    ],
)
def test_what_is_not_combined_is_refused(worker: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        check_config(Config(worker=worker, max_draft_len=3, ragged_verify=True, **options))
    assert str(refused.value).startswith(message)


def test_they_are_for_chains_on_backends_with_lengths_on_the_device() -> None:
    assert {name for name in WORKERS if ragged_on(name, "TRTLLM")} == {
        EAGLE,
        "MTPEagleWorker",
        "DraftTargetOneModelWorker",
        "SAWorker",
    }
    assert {name for name in BACKENDS if ragged_on(EAGLE, name)} == {"TRTLLM", "DSA"}


@pytest.mark.parametrize(
    ("steps", "changes", "message"),
    [
        ((PROMPTS, rows(4)), {}, "steps[1].generations[0].verify: 4 is outside 0..3"),
        ((PROMPTS, rows(-1)), {}, "steps[1].generations[0].verify: -1 is outside 0..3"),
        ((PROMPTS, rows(1)), {"ragged_verify": False}, "steps[1].generations[0].verify: is for config.ragged_verify"),
        ((CAPTURE, PROMPTS, rows(3, 1, phase=Phase.REPLAY)), {}, "steps[2].phase: no earlier step captured"),
        (
            (replace(CAPTURE, generations=(Generation(request=None, past=3, accept=3, verify=1),)),),
            {},
            "steps[0].generations[0].accept: 3 is outside 1..2",
        ),
    ],
)
def test_what_a_row_may_not_say(steps: tuple[Step, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        plans(*steps, **changes)
    assert str(refused.value).startswith(message)


def test_each_row_goes_by_its_own_width() -> None:
    """A first chunk is granted its prompt, 2 extra tokens and 3 drafts; all drafts agree."""
    first, second = plans(PROMPTS, rows(1, 0), rows(None, 2))[1:]
    assert [(plan.past, plan.query, plan.accepted, plan.granted) for plan in first] == [(5, 2, 2, 12), (4, 1, 1, 10)]
    assert [(plan.past, plan.query, plan.accepted, plan.granted) for plan in second] == [(7, 4, 4, 16), (5, 3, 3, 13)]


def test_in_flight_the_host_counts_what_each_row_feeds() -> None:
    first, second, third = plans(PROMPTS, rows(1, 3), rows(2, 0), rows(0, 0), overlap=True)[1:]
    assert [plan.ahead for plan in first] == [3, 3]
    assert [plan.ahead for plan in second] == [0, 0]
    assert [plan.ahead for plan in third] == [0, 0]


@pytest.mark.parametrize("widths", [(1, 2), (2, 1), (3, 0), (0, 3)])
def test_a_graph_is_replayed_with_any_widths_of_its_sum(widths: tuple[int, int]) -> None:
    replayed = plans(CAPTURE, PROMPTS, rows(*widths, phase=Phase.REPLAY))[-1]
    assert [plan.query for plan in replayed] == [width + 1 for width in widths]
