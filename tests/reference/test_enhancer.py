"""A suffix automaton beside another drafter: whose drafts are verified, and that nothing else knows of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given

from reference import trace
from scenarios import WORKERS, Context, Generation, Phase, Request, Scenario, Step, StepTrace, check
from scenarios.tracer import PAD_TOKEN, disagree, entry_fields, prompt_token
from tests.reference.cases import DFLASH, ENHANCED, MTP, PARD, at, configuration, last_step, scenarios
from tests.reference.test_oracle_properties import greedy

LENGTHS = {0: 5, 1: 4}
REQUESTS = tuple(Request(id=i, prompt_len=n) for i, n in LENGTHS.items())
VERIFIED = ("next_draft_tokens", "next_new_tokens", "sa_match_len", "sa_draft_tokens")
"""What an override may change of the step that makes the drafts."""


def generate(worker: str, *rows: Generation, draft_len: int = 3, **sizes: int) -> StepTrace:
    """Both requests after their prompts, in one step with these rows."""
    config = configuration(worker, draft_len, sa_threshold=2, **sizes)
    contexts = tuple(Context(request=i, chunk=n) for i, n in LENGTHS.items())
    return last_step(
        config, REQUESTS, Step(draft_len=draft_len, contexts=contexts), Step(draft_len=draft_len, generations=rows)
    )


def continuation(request: int, skipped: int, count: int) -> list[int]:
    """What the target says after the prompt, from the token behind ``skipped`` ones on."""
    prompt = [prompt_token(0, request, n) for n in range(LENGTHS[request])]
    return list(islice(greedy(prompt, 0), skipped, skipped + count))


@pytest.mark.parametrize("worker", ENHANCED)
def test_a_long_match_takes_over_all_drafts_of_its_row_and_of_no_other(worker: str) -> None:
    rows = Generation(request=0, agree=3, match=1), Generation(request=1, agree=1, match=2)
    restored = at(generate(worker, *rows), "restored")
    # Both have said two tokens by now: that of their context step and that of this one.
    short, long = continuation(0, 2, 3), continuation(1, 2, 3)
    padding = [PAD_TOKEN] * 2 if WORKERS[worker].parallel else []
    taken_over = [long[0], disagree(long[1]), disagree(long[2])]
    assert restored["next_draft_tokens"] == [short + padding, taken_over + padding]
    assert restored["sa_match_len"] == [1, 2]
    assert restored["sa_draft_tokens"] == [[disagree(token) for token in short], taken_over]


def test_the_model_drafts_on_from_its_own_drafts() -> None:
    step = generate("Eagle3OneModelWorker", Generation(request=0, agree=3, match=9))
    first, *_ = continuation(0, 2, 1)
    assert at(step, "draft[1]")["input_ids"] == [disagree(first)]
    assert at(step, "restored")["next_draft_tokens"][0][0] == first


def test_the_layers_of_mtp_keep_what_they_were_fed() -> None:
    step = generate(MTP, Generation(request=0, agree=1, match=9), Generation(request=1))
    made = continuation(0, 2, 3)
    # Layer 2 looks three tokens ahead: its last slot is fed the second draft, that of layer 1.
    assert at(step, "draft[2]")["input_ids"][2] == made[1]
    slots = [layer[-1] for layer in at(step, "updated")["draft_layers_kv"][0]]
    assert [entry_fields(slot) for slot in slots[1:]] == [(LENGTHS[0], made[0]), (LENGTHS[0], made[1])]
    assert at(step, "restored")["next_draft_tokens"][0] == [made[0], disagree(made[1]), disagree(made[2])]


@given(scenarios(ENHANCED, enhanced=True))
def test_an_override_changes_nothing_but_what_is_verified_next(scenario: Scenario) -> None:
    """The last step with drafts of the model instead, which disagree as they do where they are thrown away.

    Those of vanilla MTP agree there.
    """
    *steps, last = scenario.steps
    long = scenario.config.sa_threshold
    thrown_away = last.draft_len if scenario.config.traits.feeds_history else 0
    rows = tuple(
        replace(row, match=0, agree=row.agree if row.match < long else thrown_away) for row in last.generations
    )
    twin = trace(check(replace(scenario, steps=(*steps, replace(last, generations=rows))))).steps[-1]
    for mine, other in zip(trace(scenario).steps[-1].substeps, twin.substeps, strict=True):
        assert without(mine.fields) == without(other.fields)
        if mine.name == "restored" and "next_draft_tokens" in mine:
            shorter = [i for i, row in enumerate(last.rows) if getattr(row, "match", 0) < long or not last.draft_len]
            assert [mine["next_draft_tokens"][i] for i in shorter] == [other["next_draft_tokens"][i] for i in shorter]


def without(fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in VERIFIED}


@given(scenarios(ENHANCED, enhanced=True))
def test_a_text_is_the_prompt_until_a_generation_adds_what_was_said(scenario: Scenario) -> None:
    generated: set[int | None] = set()
    started: set[int] = set()
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        generated |= {row.request for row in step.generations}
        started |= {row.request for row in step.rows if row.request is not None}
        updated = taken.substeps[-1]
        assert updated["sa_requests"] == sorted(started)
        for i, text in updated["automaton"].items():
            prompt = [prompt_token(0, i, n) for n in range(scenario.requests[i].prompt_len)]
            assert text == prompt + (updated["emitted"][i] if i in generated else [])


def test_a_step_without_drafts_adds_to_the_text_and_finds_nothing() -> None:
    config = configuration(DFLASH, 3, sa_threshold=1)
    steps = (Step(draft_len=3, contexts=(Context(request=0, chunk=5),)), *[_alone(0)] * 2)
    step = last_step(config, REQUESTS, *steps)
    assert {"sa_match_len", "sa_draft_tokens"}.isdisjoint(at(step, "restored").fields)
    assert at(step, "updated")["automaton"][0][5:] == continuation(0, 0, 3)


def _alone(draft_len: int) -> Step:
    return Step(draft_len=draft_len, generations=(Generation(request=0, match=7),))


def test_dummies_match_nothing_and_own_nothing() -> None:
    step = last_step(
        configuration(PARD, 2, sa_threshold=1),
        (),
        Step(phase=Phase.CAPTURE, draft_len=2, generations=(Generation(request=None, past=3, accept=2, agree=1),) * 2),
    )
    for restored in step.named("restored"):
        assert restored["sa_match_len"] == [0, 0]
        assert "sa_draft_tokens" not in restored
        assert len(restored["next_draft_tokens"]) == 2
    assert (at(step, "updated")["automaton"], at(step, "updated")["sa_requests"]) == ({}, [])
