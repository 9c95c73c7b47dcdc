"""The oracle with block reuse: where prompts start, who owns which page, and which page gives way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given

from reference import trace
from scenarios import (
    Context,
    Fault,
    FaultKind,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Step,
    Substep,
    check,
    kept_in_step,
)
from scenarios.tracer import EMPTY, entry
from tests.reference.cases import ALL, EAGLE3, EAGLE3_TREE, MTP_EAGLE, PARD, SA, at, configuration, scenarios

FIRST = Request(id=0, prompt_len=9)


def like_first(request: int, prompt_len: int, tokens: int) -> Request:
    return Request(id=request, prompt_len=prompt_len, prefix_of=0, prefix_len=tokens)


def whole(*requests: Request, finish: tuple[int, ...] = (), fault: Fault | None = None) -> Step:
    """The prompts of these requests, each in one chunk."""
    contexts = tuple(Context(request=request.id, chunk=request.prompt_len) for request in requests)
    return Step(draft_len=3, contexts=contexts, finish=finish, fault=fault)


def run(worker: str, requests: tuple[Request, ...], *steps: Step, **changes: Any) -> list[dict[str, Substep]]:
    """Sub-steps of each step by name; pages of 4 tokens."""
    config = replace(configuration(worker, 3), enable_block_reuse=True, **changes)
    steps_of = trace(check(Scenario(config=config, requests=requests, steps=steps))).steps
    return [{substep.name: substep for substep in step.substeps} for step in steps_of]


@pytest.mark.parametrize(
    ("worker", "tokens", "reused"),
    [
        # Eagle3 drafts from the token after a slot: where the ninth token differs, its eighth slot is of no use.
        (EAGLE3, 9, 8),
        (EAGLE3, 8, 4),
        (EAGLE3, 4, 0),
        (MTP_EAGLE, 8, 4),
        (EAGLE3_TREE, 8, 4),
        (PARD, 8, 8),
        (PARD, 7, 4),
        (SA, 8, 8),
        (SA, 3, 0),
    ],
)
def test_a_prompt_starts_behind_the_pages_that_it_shares(worker: str, tokens: int, reused: int) -> None:
    second = like_first(1, 11, tokens)
    seen = run(worker, (FIRST, second), whole(FIRST), whole(second))[1]
    assert seen["prepared"]["_seq_lens"] == [11 - reused]
    assert seen["prepared"]["position_ids"] == [*range(reused, 11)]
    assert seen["prepared"]["kv_lens_runtime"] == [11]
    updated = seen["updated"]
    assert updated["reused_tokens"] == {0: 0, 1: reused}
    free = run(worker, (FIRST, second), whole(FIRST), whole(second), num_blocks=64)[1]["updated"]["free_blocks"]
    config = configuration(worker, 3)
    room = config.num_extra_kv_tokens + config.tokens_per_gen_step(3) - 1
    assert free == 64 - -(-(9 + room) // 4) - -(-(11 + room) // 4) + reused // 4


def test_one_token_at_least_is_computed() -> None:
    """Of a prompt of 8 tokens, all of which are known, the second page is computed again, and stays the request's."""
    second = like_first(1, 8, 8)
    seen = run(PARD, (FIRST, second), whole(FIRST), whole(second))[1]
    assert seen["prepared"]["_seq_lens"] == [4]
    assert [owners for owners, *_ in seen["updated"]["known_pages"]] == [1, 2]


def test_known_pages_hold_what_their_tokens_say() -> None:
    seen = run(EAGLE3, (FIRST,), whole(FIRST))[0]["updated"]
    tokens = FIRST.prompt(0)
    assert seen["known_pages"] == [[1, *tokens[:5]], [1, *tokens]]
    assert seen["known_kv"] == [[entry(n, tokens[n]) for n in page] for page in (range(4), range(4, 8))]
    assert seen["known_draft_kv"] == [[entry(n, tokens[n + 1]) for n in page] for page in (range(4), range(4, 8))]
    without_model = run(SA, (FIRST,), whole(FIRST))[0]["updated"]
    assert without_model["known_draft_kv"] == [[EMPTY] * 4] * 2


def test_a_prompt_is_known_when_it_is_computed() -> None:
    """Not by its first chunk, nor by one that starts with it, nor with ``overlap`` while its step is in flight."""
    requests = FIRST, like_first(1, 10, 9), like_first(2, 10, 9)
    chunk = Step(draft_len=3, contexts=(Context(request=0, chunk=8),))
    last = Step(draft_len=3, contexts=(Context(request=0, chunk=1), Context(request=1, chunk=10)))
    seen = run(EAGLE3, requests, chunk, last, whole(requests[2]))
    assert seen[0]["updated"]["known_pages"] == []
    assert seen[2]["updated"]["reused_tokens"] == {0: 0, 1: 0, 2: 8}
    # Request 1 has computed the same pages, but those of request 0 came first.
    assert [owners for owners, *_ in seen[1]["updated"]["known_pages"]] == [1, 1]
    late = run(EAGLE3, requests, whole(FIRST), whole(requests[1]), whole(requests[2]), overlap=True)
    assert [step["prepared"]["_seq_lens"] for step in late] == [[9], [10], [2]]
    assert [len(step["updated"]["known_pages"]) for step in late] == [2, 2, 2]


def test_pages_outlive_their_owners_until_their_room_is_needed() -> None:
    """Of 8 pages each prompt of 9 takes 4; those of the first that is over give way, its last one before the others."""
    other, long = Request(id=1, prompt_len=9), Request(id=2, prompt_len=14)
    again, fourth = like_first(3, 10, 9), Request(id=4, prompt_len=10, prefix_of=1, prefix_len=9)
    ending = [whole(request, finish=(request.id,)) for request in (FIRST, other, long, again, fourth)]
    seen = [step["updated"] for step in run(EAGLE3, (FIRST, other, long, again, fourth), *ending, num_blocks=8)]
    assert [step["free_blocks"] for step in seen] == [4, 4, 3, 4, 4]
    first, second, third = (request.prompt(0) for request in (FIRST, other, long))
    keys = [[key for _, *key in step["known_pages"]] for step in seen]
    assert [[of[i] for i in step["reclaim_order"]] for of, step in zip(keys, seen, strict=True)] == [
        [],
        [first, first[:5]],
        [first[:5], second, second[:5]],
        # What is known of the first prompt is taken by one that begins like it, and its second page is known again.
        [second[:5], third[:13], third[:9], third[:5]],
        [third[:9], third[:5], first, first[:5]],
    ]
    assert [step["reused_tokens"] for step in seen[3:]] == [{3: 4}, {4: 4}]


def test_each_cache_goes_by_its_own_pages_and_both_by_the_same_tokens() -> None:
    """Pages of 4 and 3 tokens: 12 of a prompt are the first that fill pages of both."""
    first = Request(id=0, prompt_len=14)
    apart = {"use_separate_draft_kv_cache": True, "draft_tokens_per_block": 3, "draft_num_blocks": 40}
    for tokens, reused in ((13, 12), (12, 0)):
        second = like_first(1, 14, tokens)
        updated = run(EAGLE3, (first, second), whole(first), whole(second), **apart)[1]["updated"]
        assert updated["reused_tokens"] == {0: 0, 1: reused}
        owners = [[n for n, *_ in updated[name]] for name in ("known_pages", "draft_known_pages")]
        assert [sum(of) for of in owners] == [len(of) + reused // size for of, size in zip(owners, (4, 3), strict=True)]


def test_a_failure_leaves_nothing_known() -> None:
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    requests = FIRST, like_first(1, 10, 9), like_first(2, 10, 9)
    seen = run(EAGLE3, requests, whole(FIRST), whole(requests[1], fault=fault), whole(requests[2]))
    failed = seen[1]["failed"]
    assert (failed["known_pages"], failed["reused_tokens"], failed["free_blocks"]) == ([], {}, 64)
    assert seen[2]["prepared"]["_seq_lens"] == [10]


SHARING = sorted(set(ALL) - {"MTPWorker", "DFlashWorker", "DSparkWorker"})
SAME = ("emitted", "kv_tokens", "target_kv", "draft_kv", "py_rewind_len", "automaton", "draft_tree")


@given(scenarios(SHARING))
def test_reuse_is_seen_in_no_text_and_no_cache(scenario: Scenario) -> None:
    requests = tuple(replace(r, prefix_of=0, prefix_len=min(r.prompt_len, 5)) if r.id else r for r in scenario.requests)
    config = replace(scenario.config, enable_block_reuse=True, tokens_per_block=2)
    try:
        shared = trace(check(replace(scenario, config=config, requests=requests)))
    except ScenarioError:
        assume(False)
        raise
    alone = trace(check(replace(scenario, config=replace(config, enable_block_reuse=False), requests=requests)))
    for mine, other in zip(shared.steps, alone.steps, strict=True):
        for field in SAME:
            updated, expected = at(mine, "updated"), at(other, "updated")
            assert updated.fields.get(field) == expected.fields.get(field)


def test_generations_own_what_they_are_granted_beside_shared_pages() -> None:
    """A request that goes on pays for its own pages alone, and gives only these back."""
    second = like_first(1, 10, 9)
    steps = (whole(FIRST), whole(second), *[Step(draft_len=3, generations=(Generation(request=1),))] * 3)
    seen = [step["updated"] for step in run(EAGLE3, (FIRST, second), *steps)]
    assert [step["kv_tokens"][1] for step in seen[1:]] == [15, 16, 17, 18]
    assert [step["free_blocks"] for step in seen] == [60, 58, 58, 57, 57]


def test_ranks_are_told_what_a_prompt_computes() -> None:
    second = like_first(1, 11, 9)
    ranks = {"attention_dp_size": 2, "attention_dp_rank": 1}
    busy = (Peer(contexts=(6,)),)
    seen = run(EAGLE3, (FIRST, second), *(replace(whole(r), peers=busy) for r in (FIRST, second)), **ranks)
    assert [step["prepared"]["all_rank_num_tokens"] for step in seen] == [[6, 9], [6, 11 - 8]]
    assert seen[1]["updated"]["collectives"][1] == ["attn_metadata.all_rank_num_tokens", [6, 3]]


@pytest.mark.parametrize(("num_blocks", "known"), [(6, 2), (5, 1), (4, 0)])
def test_dummies_take_pages_that_nobody_has_and_leave_them_blank(num_blocks: int, known: int) -> None:
    """A prompt has left 2 known pages behind when a graph is padded with 2 dummies of 6 tokens each."""
    ranks = {"attention_dp_size": 2, "num_blocks": num_blocks}
    config = replace(configuration(EAGLE3, 3), **ranks)
    dummies = (Generation(request=None, past=1),) * 2
    prompt = replace(whole(FIRST, finish=(0,)), peers=(Peer(),))
    idle = kept_in_step(config, Step(phase=Phase.REPLAY, draft_len=3, peers=(Peer(generations=2),)))
    capture = Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies)
    again = replace(whole(like_first(1, 10, 9)), peers=(Peer(),))
    seen = run(EAGLE3, (FIRST, like_first(1, 10, 9)), capture, prompt, idle, again, **ranks)
    assert len(seen[1]["updated"]["known_pages"]) == 2
    assert len(seen[2]["updated"]["known_pages"]) == known
    assert seen[2]["updated"]["free_blocks"] == num_blocks
    assert seen[3]["updated"]["reused_tokens"] == {1: 4 * known}
