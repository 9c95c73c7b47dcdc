"""Several ranks in a scenario: which batches and dummies are valid, and what each error says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scenarios import (
    Config,
    Context,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Step,
    batches,
    check,
    dumps,
    kept_in_step,
    loads,
    padding,
)

CONFIG = Config(
    worker="MTPWorker", max_draft_len=2, attention_dp_size=3, attention_dp_rank=1, max_num_requests=4, max_num_tokens=20
)
DUMMY = Generation(request=None, past=2)
PROMPT = Step(draft_len=2, contexts=(Context(request=0, chunk=5),), peers=(Peer(contexts=(3, 4)), Peer()))
CAPTURE = Step(phase=Phase.CAPTURE, draft_len=2, generations=(DUMMY,) * 3)
REPLAY = Step(
    phase=Phase.REPLAY,
    draft_len=2,
    generations=(Generation(request=0), DUMMY, DUMMY),
    peers=(Peer(generations=3), Peer()),
)
IDLE = Step(draft_len=2, generations=(DUMMY,), peers=(Peer(generations=2), Peer()))


def scenario(*steps: Step, config: Config = CONFIG) -> Scenario:
    return Scenario(config=config, requests=(Request(id=0, prompt_len=5),), steps=steps)


def test_idle_and_padded_steps_are_valid_and_travel() -> None:
    case = check(scenario(CAPTURE, PROMPT, REPLAY, IDLE))
    assert loads(dumps(case)) == case
    assert [kept_in_step(CONFIG, step) for step in case.steps] == list(case.steps)
    assert [len(padding(CONFIG, step)) for step in case.steps] == [0, 0, 2, 1]


def test_batches_are_those_that_run() -> None:
    assert batches(CONFIG, CAPTURE) == (Peer(generations=3),) * 3
    assert batches(CONFIG, PROMPT) == (Peer(contexts=(3, 4)), Peer(contexts=(5,)), Peer(generations=1))
    assert batches(CONFIG, REPLAY) == (Peer(generations=3),) * 3
    assert batches(CONFIG, IDLE) == (Peer(generations=2), Peer(generations=1), Peer(generations=1))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((replace(CAPTURE, peers=IDLE.peers),), "steps[0].peers: has 2 entries, not 0: in start-up"),
        ((replace(PROMPT, peers=()),), "steps[0].peers: has 0 entries, not 2: one for each"),
        ((replace(IDLE, peers=(Peer(), Peer())),), "steps[0].peers: leave all ranks idle; give one"),
        ((replace(IDLE, generations=(DUMMY, DUMMY)),), "steps[0].generations: does not end with the 1 du"),
        ((replace(IDLE, generations=(replace(DUMMY, past=3),)),), "steps[0].generations: does not end with the 1 du"),
        ((CAPTURE, PROMPT, replace(REPLAY, generations=REPLAY.generations[:1])), "steps[2].generations: does not"),
        ((replace(IDLE, peers=(Peer(contexts=(0,)), Peer())),), "steps[0].peers[0].contexts[0]: 0 is too small"),
        ((replace(IDLE, peers=(Peer(), Peer(generations=-1))),), "steps[0].peers[1].generations: -1 is too small"),
        ((replace(IDLE, peers=(Peer(contexts=(1,) * 5), Peer())),), "steps[0].peers[0]: its 5 rows exceed max"),
        ((replace(IDLE, peers=(Peer(contexts=(21,)), Peer())),), "steps[0].peers[0]: its 21 tokens exceed"),
        (
            (CAPTURE, PROMPT, replace(REPLAY, peers=(Peer(contexts=(1,)), Peer()))),
            "steps[2].peers[0].contexts: a CUDA graph holds generations only, on all ranks; remove them",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        check(scenario(*steps))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_dp_rank": 3}, "config.attention_dp_rank: 3 is no rank of 3; write 0 to 2"),
        ({"attention_dp_size": 1}, "config.attention_dp_rank: 1 is no rank of 1; write 0, or add ranks"),
        ({"attention_dp_size": 0, "attention_dp_rank": 0}, "config.attention_dp_size: 0 is too small; write 1 or more"),
    ],
)
def test_a_rank_is_one_of_the_ranks(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        check(scenario(PROMPT, config=replace(CONFIG, **change)))
    assert str(refused.value) == message


def test_a_single_rank_has_no_dummies_in_served_steps() -> None:
    alone = replace(CONFIG, attention_dp_size=1, attention_dp_rank=0)
    with pytest.raises(ScenarioError, match=r"^steps\[0\]\.generations\[0\]\.request: is null in a step"):
        check(scenario(replace(IDLE, peers=()), config=alone))
