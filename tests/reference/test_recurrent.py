"""Recurrent states of the oracle: one per request, of its cached tokens, whatever else was fed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import reference
from scenarios import WORKERS, Context, Generation, Phase, Request, Scenario, Step, check
from scenarios.tracer import PRIME, entry, prompt, term
from tests.reference.cases import EAGLE3, MTP_EAGLE_TREE, configuration

RECURRENT = [worker for worker, traits in WORKERS.items() if traits.recurrent]
REQUESTS = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=4), Request(id=2, prompt_len=3))


def run(worker: str, *steps: Step, **changes: Any) -> tuple[dict[str, Any], ...]:
    """Sub-steps of each step by name."""
    config = replace(configuration(worker, 3), **{"recurrent": True, **changes})
    scenario = check(Scenario(config=config, requests=REQUESTS, steps=steps))
    return tuple({s.name: s.fields for s in step.substeps} for step in reference.trace(scenario).steps)


def served(worker: str) -> tuple[Step, ...]:
    """One request joins another; then one of them alone, then both in another order."""
    agree = 2 * WORKERS[worker].drafts_for_contexts
    return (
        Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=agree),)),
        Step(
            draft_len=3,
            contexts=(Context(request=1, chunk=4),),
            generations=(Generation(request=0, agree=3),),
        ),
        Step(draft_len=3, generations=(Generation(request=0, agree=1),)),
        Step(draft_len=3, generations=(Generation(request=1, agree=2), Generation(request=0, agree=3))),
        Step(draft_len=3, generations=(Generation(request=0), Generation(request=1))),
    )


def state_of(slots: list[int]) -> int:
    """What is in these slots of a cache, added up."""
    return sum(term(n, slot) for n, slot in enumerate(slots)) % PRIME


@pytest.mark.parametrize("worker", RECURRENT)
def test_a_state_is_that_of_what_is_cached(worker: str) -> None:
    for step in run(worker, *served(worker)):
        cached = {request: state_of(slots) for request, slots in step["updated"]["target_kv"].items()}
        assert step["updated"]["recurrent_states"] == cached
        rows = step["prepared"]["request_ids"]
        assert step["restored"]["ssm_states"] == [cached[request] for request in rows]


@pytest.mark.parametrize("worker", RECURRENT)
def test_a_step_goes_on_from_the_state_that_the_last_one_of_its_request_left(worker: str) -> None:
    steps = run(worker, *served(worker))
    kept = [step["updated"]["recurrent_states"] for step in steps]
    assert [step["entered"]["ssm_states"] for step in steps] == [
        [None],
        [None, kept[0][0]],
        [kept[1][0]],
        [kept[1][1], kept[2][0]],
        [kept[3][0], kept[3][1]],
    ]
    assert kept[2][1] == kept[1][1]


def test_every_fed_token_has_a_state_and_the_last_accepted_one_becomes_live() -> None:
    step = run(EAGLE3, *served(EAGLE3))[1]
    past, fed = prompt(0, 0, 5), [step["prepared"]["input_ids"][4], *step["prepared"]["draft_tokens"]]
    cached = state_of([entry(n, token) for n, token in enumerate(past)])
    (states,) = step["verified"]["intermediate_ssm_states"]
    assert states == [(cached + state_of_fed(fed[: count + 1])) % PRIME for count in range(4)]
    # Two drafts were to agree, so that three tokens are cached for good.
    assert step["verified"]["num_accepted_tokens"] == [1, 3]
    assert step["restored"]["ssm_states"][1] == states[2]


def state_of_fed(tokens: list[int]) -> int:
    """What tokens at positions 5, 6, ... add."""
    return sum(term(5 + j, entry(5 + j, token)) for j, token in enumerate(tokens))


def test_a_node_of_a_tree_goes_on_from_its_parent() -> None:
    worker = MTP_EAGLE_TREE
    steps = run(worker, *served(worker))
    # The third step of request 0 verifies a tree of its second one, whose first drafts agree.
    prepared, verified = steps[2]["prepared"], steps[2]["verified"]
    (mask,), past = prepared["spec_decoding_packed_mask"], steps[1]["updated"]["target_kv"][0]
    nodes = [steps[1]["updated"]["emitted"][0][-1], *prepared["draft_tokens"]]
    (states,) = verified["intermediate_ssm_states"]
    assert states == [state_of([*past, *on(len(past), [nodes[v] for v in path])]) for path in mask]
    assert verified["num_accepted_tokens"] == [4]
    live = steps[2]["restored"]["ssm_states"][0]
    assert live in states
    assert live == state_of(steps[2]["updated"]["target_kv"][0])


def on(position: int, tokens: list[int]) -> list[int]:
    """Slots that these tokens fill from ``position`` on."""
    return [entry(position + j, token) for j, token in enumerate(tokens)]


def test_a_chunk_goes_on_where_the_one_before_ended() -> None:
    steps = run(
        EAGLE3,
        Step(draft_len=3, contexts=(Context(request=0, chunk=2),)),
        Step(draft_len=3, contexts=(Context(request=1, chunk=4), Context(request=0, chunk=3))),
        Step(draft_len=0, generations=(Generation(request=0),)),
    )
    first = state_of(on(0, prompt(0, 0, 2)))
    assert steps[0]["restored"]["ssm_states"] == [first]
    assert steps[1]["entered"]["ssm_states"] == [None, first]
    assert steps[1]["restored"]["ssm_states"][1] == state_of(on(0, prompt(0, 0, 5)))
    # Contexts promote nothing; a generation without drafts does.
    assert [step["restored"]["update_mamba_states"] for step in steps] == [0, 0, 1]
    assert steps[2]["updated"]["recurrent_states"][0] == state_of(steps[2]["updated"]["target_kv"][0])


def test_dummies_have_no_state() -> None:
    steps = run(
        EAGLE3,
        Step(phase=Phase.CAPTURE, draft_len=3, generations=(Generation(request=None, past=4, accept=2),)),
        Step(draft_len=3, contexts=(Context(request=0, chunk=5),)),
        Step(phase=Phase.REPLAY, draft_len=3, generations=(Generation(request=0),)),
    )
    capture, _, replay = steps
    assert capture["entered"]["ssm_states"] == capture["restored"]["ssm_states"] == [None]
    assert capture["verified"]["intermediate_ssm_states"] == [None]
    assert capture["restored"]["update_mamba_states"] == 1
    assert capture["updated"]["recurrent_states"] == {}
    assert replay["restored"]["ssm_states"] == [*replay["updated"]["recurrent_states"].values()]
    assert "update_mamba_states" not in replay["restored"]
    assert {step["restored"]["sentinel_state"] for step in steps} == {0}


@pytest.mark.parametrize("worker", RECURRENT)
def test_nothing_else_depends_on_it(worker: str) -> None:
    states = {"ssm_states", "intermediate_ssm_states", "recurrent_states", "update_mamba_states", "sentinel_state"}
    mine = run(worker, *served(worker))
    plain = run(worker, *served(worker), recurrent=False)
    assert [{name: without(s, states) for name, s in step.items()} for step in mine] == [*plain]


def without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
