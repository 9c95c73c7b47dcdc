"""Proposals of the oracle: what a drafter thought of each draft, as long as it is not verified."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import reference
from scenarios import WORKERS, Context, Generation, Request, Scenario, Step, check
from scenarios.tracer import NO_PROPOSAL, PRIME, entry, proposal, term
from tests.reference.cases import DFLASH, EAGLE3, MTP, PARD, configuration

REJECTING = [worker for worker, traits in WORKERS.items() if traits.rejection_sampling]
REQUESTS = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=4))


def run(worker: str, *steps: Step, **changes: Any) -> tuple[dict[str, Any], ...]:
    """Sub-steps of each step by name."""
    config = replace(configuration(worker, 3), **{"rejection_sampling": True, **changes})
    scenario = check(Scenario(config=config, requests=REQUESTS, steps=steps))
    return tuple({s.name: s.fields for s in step.substeps} for step in reference.trace(scenario).steps)


def served(worker: str) -> tuple[Step, ...]:
    """Both requests from their prompts on; then one of them alone, then both in another order."""
    agree = 2 * WORKERS[worker].drafts_for_contexts
    return (
        Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=agree), Context(request=1, chunk=4))),
        Step(draft_len=3, generations=(Generation(request=0, agree=3), Generation(request=1, agree=1))),
        Step(draft_len=3, generations=(Generation(request=0, agree=2),)),
        Step(draft_len=3, generations=(Generation(request=1), Generation(request=0))),
    )


@pytest.mark.parametrize("worker", REJECTING)
def test_where_a_draft_stands_target_and_drafter_think_the_same(worker: str) -> None:
    """Of drafts made one after the other the target knows all that the drafter knew; of those made in one call as far
    as they agree with it.
    """
    steps, traits = run(worker, *served(worker)), WORKERS[worker]
    for before, step in pairwise(steps[1:]):
        width = len(step["prepared"]["draft_tokens"]) // len(step["verified"]["draft_probs"])
        rows = enumerate(zip(step["prepared"]["request_ids"], step["verified"]["draft_probs"], strict=True))
        for row, (request, proposals) in rows:
            cached, said = before["updated"]["target_kv"][request], before["updated"]["emitted"][request]
            drafts = step["prepared"]["draft_tokens"][row * width :][:3]
            slots = [*cached, *(entry(len(cached) + j, t) for j, t in enumerate([said[-1], *drafts]))]
            digests = [sum(term(n, slot) for n, slot in enumerate(slots[: len(cached) + j + 1])) for j in range(3)]
            thoughts = [proposal(depth, digest % PRIME) for depth, digest in enumerate(digests)]
            same = 3 if traits.drafts_for_contexts else step["verified"]["num_accepted_tokens"][row]
            assert proposals[:same] == thoughts[:same]
            assert all(mine != other for mine, other in zip(proposals[same:], thoughts[same:3], strict=True))


@pytest.mark.parametrize("worker", REJECTING)
def test_they_are_kept_by_request_until_its_next_step(worker: str) -> None:
    steps = run(worker, *served(worker))
    kept = [step["updated"]["kept_draft_probs"] for step in steps]
    assert [step["verified"]["draft_probs"] for step in steps] == [
        [],
        [kept[0][0], kept[0][1]],
        [kept[1][0]],
        [kept[1][1], kept[2][0]],
    ]
    assert kept[2][1] == kept[1][1]
    for step, of_requests in zip(steps, kept, strict=True):
        assert step["restored"]["draft_probs"] == [of_requests[i] for i in step["prepared"]["request_ids"]]
    assert [step["restored"]["rejection_rows"] for step in steps] == [0, 2, 1, 2]


def test_a_draft_that_was_not_made_has_a_placeholder() -> None:
    one, other = Generation(request=0, agree=1), Generation(request=1)
    steps = run(
        EAGLE3,
        served(EAGLE3)[0],
        Step(draft_len=1, generations=(one, other)),
        Step(draft_len=3, generations=(other, one)),
        Step(draft_len=0, generations=(Generation(request=0),)),
        Step(draft_len=2, generations=(one, other)),
    )
    kept = [step["updated"]["kept_draft_probs"] for step in steps]
    assert steps[1]["verified"]["draft_probs"] == [kept[0][0][:1], kept[0][1][:1]]
    assert steps[2]["verified"]["draft_probs"] == [[*kept[1][i], NO_PROPOSAL, NO_PROPOSAL] for i in (1, 0)]
    # Without drafts nothing is verified, kept or counted; what was made before is of no use any more.
    assert "verified" not in steps[3]
    assert steps[3]["restored"]["draft_probs"] == [[]]
    assert steps[3]["restored"]["rejection_rows"] == 0
    assert steps[4]["verified"]["draft_probs"] == [[NO_PROPOSAL] * 2, kept[2][1][:2]]


@pytest.mark.parametrize("worker", [PARD, DFLASH])
def test_drafts_of_one_call_are_none_of_contexts(worker: str) -> None:
    first, second, *_ = run(worker, *served(worker))
    assert first["restored"]["draft_probs"] == second["verified"]["draft_probs"] == [[NO_PROPOSAL] * 3] * 2


def test_the_drafters_of_a_text_think_alike() -> None:
    """What is proposed depends on the tokens before a draft alone, so on no worker that drafts one by one."""
    assert (
        run(EAGLE3, *served(EAGLE3))[2]["updated"]["kept_draft_probs"]
        == (run(MTP, *served(MTP))[2]["updated"]["kept_draft_probs"])
    )


@pytest.mark.parametrize("worker", REJECTING)
def test_nothing_else_depends_on_them(worker: str) -> None:
    names = {"draft_probs", "kept_draft_probs", "rejection_rows"}
    mine = run(worker, *served(worker))
    plain = run(worker, *served(worker), rejection_sampling=False)
    assert [{name: without(s, names) for name, s in step.items()} for step in mine] == [*plain]


def without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
