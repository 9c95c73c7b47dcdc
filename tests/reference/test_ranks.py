"""Attention data parallelism: the counts of upstream's worked example, worker by worker, and what all ranks run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference import trace
from scenarios import (
    WORKERS,
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    Step,
    StepTrace,
    check,
)
from tests.reference.cases import (
    DFLASH,
    DRAFT_TARGET,
    DSPARK,
    EAGLE3,
    EAGLE3_TREE,
    MTP,
    MTP_EAGLE,
    MTP_EAGLE_TREE,
    PARD,
    SA,
    at,
    configuration,
)
from tests.worked_examples import RANKS

LATER = [3, 3]
ANNOUNCED = {
    EAGLE3: [7, 3],
    MTP_EAGLE: [13, 12],
    DRAFT_TARGET: [7, 3],
    MTP: [11, 9],
    SA: [13, 12],
    DFLASH: [13, 12],
    DSPARK: [13, 12],
    PARD: [17, 18],
    EAGLE3_TREE: [7, 3],
    MTP_EAGLE_TREE: [19, 21],
}
"""``num_tokens`` of both ranks after ``SpecMetadata.prepare``, with trees of six nodes."""
TOLD = {
    EAGLE3: [[7, 3], LATER, LATER],
    MTP_EAGLE: [[13, 12], LATER, LATER],
    MTP_EAGLE_TREE: [[19, 21], [6, 6], [12, 12]],
}
"""The ``all_rank_num_tokens`` argument of each draft call."""
SHOWN = {
    DRAFT_TARGET: [[13, 12], LATER, LATER],
    EAGLE3_TREE: [[19, 21], LATER, LATER],
    MTP_EAGLE_TREE: [[19, 21], [6, 6], [12, 12]],
}
"""What workers that write into the attention metadata show there at each draft call."""


def _example(worker: str, rank: int) -> list[StepTrace]:
    """The worked example on one of its two ranks: a first step that begins the generations, then the example."""
    peers = [Peer(contexts=tuple(prompts), generations=count) for prompts, count in RANKS.ranks]
    own, other = peers[rank], peers[1 - rank]
    ids = range(own.generations)
    requests = [Request(id=i, prompt_len=4) for i in ids] + [Request(id=9, prompt_len=5)] * len(own.contexts)
    begin = Step(
        draft_len=3,
        contexts=tuple(Context(request=i, chunk=4) for i in ids),
        peers=(Peer(contexts=(4,) * other.generations),),
    )
    step = Step(
        draft_len=3,
        contexts=tuple(Context(request=9, chunk=chunk) for chunk in own.contexts),
        generations=tuple(Generation(request=i) for i in ids),
        peers=(other,),
    )
    return _run(_config(worker, 2, rank), requests, begin, step)


def _config(worker: str, size: int, rank: int) -> Config:
    return replace(configuration(worker, 3), attention_dp_size=size, attention_dp_rank=rank)


def _run(config: Config, requests: list[Request], *steps: Step) -> list[StepTrace]:
    return list(trace(check(Scenario(config=config, requests=tuple(requests), steps=steps))).steps)


@pytest.mark.parametrize("worker", WORKERS)
def test_every_rank_is_told_the_same(worker: str) -> None:
    first, second = (_example(worker, rank)[-1] for rank in (0, 1))
    width = configuration(worker, 3).tokens_per_gen_step(3)
    tokens = [5 + 2 * width, 3 * width]
    if width == 4:
        assert tokens == RANKS.all_rank_num_tokens
    for rank, step in enumerate((first, second)):
        prepared = at(step, "prepared")
        assert prepared["all_rank_num_tokens"] == at(step, "restored")["all_rank_num_tokens"] == tokens
        assert prepared["spec_all_rank_num_tokens"] == ANNOUNCED[worker]
        assert prepared["spec_num_tokens"] == ANNOUNCED[worker][rank]
        assert prepared["all_rank_num_seqs"] == RANKS.all_rank_num_seqs
        assert prepared["all_rank_num_gens"] == [2, 3]
        has = worker in (EAGLE3, MTP_EAGLE, EAGLE3_TREE, MTP_EAGLE_TREE)
        assert prepared.fields.get("subseq_all_rank_num_tokens") == (RANKS.subseq_all_rank_num_tokens if has else None)
    assert at(first, "updated")["collectives"] == at(second, "updated")["collectives"]
    assert at(first, "updated")["graph_key"] == at(second, "updated")["graph_key"]


@pytest.mark.parametrize("worker", WORKERS)
def test_draft_calls_go_by_the_lists_of_their_worker(worker: str) -> None:
    calls = list(_example(worker, 0)[-1].named("draft"))
    told = [call["draft_all_rank_num_tokens"] for call in calls if "draft_all_rank_num_tokens" in call]
    assert told == TOLD.get(worker, [])
    target = at(_example(worker, 0)[-1], "prepared")["all_rank_num_tokens"]
    assert [call["all_rank_num_tokens"] for call in calls] == SHOWN.get(worker, [target] * len(calls))


def test_experts_of_target_and_drafter_meet_in_rounds_of_the_largest_rank() -> None:
    step = _run(
        _config(MTP_EAGLE, 3, 1),
        [Request(id=0, prompt_len=5)],
        Step(draft_len=2, contexts=(Context(request=0, chunk=5),), peers=(Peer(), Peer(contexts=(33, 1)))),
    )[0]
    rounds = [[1, 2, 12], [1, 2, 11], [1, 1, 11]]
    assert at(step, "updated")["collectives"] == [
        ["executor.batch", [0, 1, 2]],
        ["attn_metadata.all_rank_num_tokens", [3, 5, 34]],
        ["spec_metadata.all_rank_num_tokens", [3, 5, 34]],
        ["spec_metadata.all_rank_num_seqs", [1, 1, 2]],
        ["spec_metadata.all_rank_num_gens", [1, 0, 0]],
        *(["target_model.moe", counts] for counts in rounds),
        *(["draft_model.moe", counts] for counts in rounds),
        ["draft_model.moe", [1, 1, 2]],
    ]


@pytest.mark.parametrize("worker", WORKERS)
def test_dummies_keep_a_rank_in_step_and_leave_nothing_behind(worker: str) -> None:
    config = _config(worker, 2, 0)
    dummy = Generation(request=None, past=config.least_history)
    requests = [Request(id=0, prompt_len=4)]
    capture = Step(phase=Phase.CAPTURE, draft_len=3, generations=(dummy, dummy))
    begin = Step(draft_len=3, contexts=(Context(request=0, chunk=4),), peers=(Peer(),))
    padded = Step(
        phase=Phase.REPLAY,
        draft_len=3,
        generations=(Generation(request=0), dummy),
        peers=(Peer(generations=2),),
    )
    idle = Step(draft_len=3, generations=(dummy,), peers=(Peer(generations=1),))
    last = Step(draft_len=3, generations=(Generation(request=0),), peers=(Peer(),))
    steps = _run(config, requests, capture, begin, padded, idle, last)
    alone = _run(replace(config, attention_dp_size=1), requests, *(
        replace(step, phase=Phase.EAGER, generations=step.generations[:1], peers=()) for step in (begin, padded, last)
    ))  # fmt: skip
    for step, single in zip((steps[1], steps[2], steps[4]), alone, strict=True):
        mine, other = dict(at(step, "updated").fields), dict(at(single, "updated").fields)
        assert mine.pop("collectives")
        assert bool(mine.pop("graph_key")) is (step is steps[2])
        assert other.pop("graph_key") is None
        assert mine == other
    assert at(steps[2], "prepared")["request_ids"] == [0, None]
    assert at(steps[3], "prepared")["all_rank_num_seqs"] == [1, 1]
    # Nothing of an idle step is left but what was there before it.
    assert at(steps[3], "updated")["kv_tokens"] == at(steps[2], "updated")["kv_tokens"]
    open_drafts = worker in (MTP, SA, DFLASH, DSPARK)
    assert ("next_draft_tokens" in at(steps[2], "restored")) != open_drafts


def test_a_failure_puts_the_counts_back() -> None:
    fault = Fault(site="draft_model.forward", occurrence=2, kind=FaultKind.ERROR)
    step = Step(draft_len=3, contexts=(Context(request=0, chunk=4),), peers=(Peer(generations=1),), fault=fault)
    failed = _run(_config(DRAFT_TARGET, 2, 1), [Request(id=0, prompt_len=4)], step)[0]
    assert at(failed, "failed")["all_rank_num_tokens"] == [4, 4]
