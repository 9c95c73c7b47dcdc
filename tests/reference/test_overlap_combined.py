"""The oracle under the overlap scheduler with what the host would have to know, other ranks and further backends."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

import reference
from scenarios import Context, Generation, Peer, Phase, Request, Scenario, Step, check, kept_in_step
from scenarios.tracer import GRAMMAR_START, grammar_state
from tests.reference.test_overlap import CONFIG

ONE, OTHER = Generation(request=0, agree=2), Generation(request=1, agree=2)
STEPS = (
    Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=2),)),
    Step(draft_len=3, contexts=(Context(request=1, chunk=4, agree=2),), generations=(ONE,)),
    Step(draft_len=2, generations=(OTHER, ONE)),
    Step(draft_len=3, generations=(ONE, OTHER)),
)


def run(*steps: Step, thinking: bool = False, **changes: Any) -> tuple[dict[str, Any], ...]:
    """Sub-steps of each step by name; the first request may think."""
    requests = (Request(id=0, prompt_len=5, thinking=thinking), Request(id=1, prompt_len=4))
    scenario = Scenario(config=replace(CONFIG, **changes), requests=requests, steps=steps)
    return tuple({s.name: s for s in step.substeps} for step in reference.trace(check(scenario)).steps)


@pytest.mark.parametrize(
    "changes",
    [
        {"guided_decoding": True},
        {"force_num_accepted_tokens": 1.5},
        {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 2, "relaxed_delta": 0.5, "thinking": True},
        {"sa_threshold": 2},
        {"host_offload": True},
        {"attention_backend": "DEEPSEEK_V4", "index_topk": 2, "window_size": 3, "compress_ratios": (1, 2, 4)},
        {"attention_backend": "FLASHINFER"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_step_leaves_is_what_it_leaves_without_overlap(changes: dict[str, Any]) -> None:
    kept = ("emitted", "target_kv", "draft_kv", "matchers", "relaxed_delta", "automaton", "py_rewind_len")
    automata = [replace(row, match=row.request or 0) for row in (ONE, OTHER)]
    steps = (*STEPS[:3], replace(STEPS[3], generations=tuple(automata))) if "sa_threshold" in changes else STEPS
    for late, plain in zip(run(*steps, **changes), run(*steps, overlap=False, **changes), strict=True):
        shown = [{name: of["updated"][name] for name in kept if name in of["updated"]} for of in (late, plain)]
        assert shown[0] == shown[1]
        assert late["restored"]["new_tokens"] == plain["restored"]["new_tokens"]


def test_matchers_go_with_the_stream_and_not_with_the_host() -> None:
    """Before a forward they have read what the step in flight accepts, of which the host knows nothing yet."""
    steps = run(*STEPS, guided_decoding=True)
    emitted = steps[2]["updated"]["emitted"]
    read = [[len(emitted[i]) - 1, reduce(grammar_state, emitted[i][:-1], GRAMMAR_START)] for i in (0, 1)]
    assert steps[3]["entered"]["matcher_rows"] == read
    assert steps[2]["updated"]["matchers"] == dict(enumerate(read))
    # Request 1 starts in the next step, which has been launched by then.
    assert steps[0]["updated"]["matchers"].keys() == {0}


def test_a_waiting_iteration_draws_no_number() -> None:
    steps = run(*STEPS[:2], Step(draft_len=3), STEPS[3], force_num_accepted_tokens=1.5)
    counters = [step["restored"]["force_accept_counter"] for step in steps if step]
    assert counters == [1, 2, 3]


def _ranked(*steps: Step, rank: int = 0, **changes: Any) -> tuple[dict[str, Any], ...]:
    several = {"attention_dp_size": 2, "attention_dp_rank": rank, **changes}
    config = replace(CONFIG, **several)
    return run(*(kept_in_step(config, step) if step.rows or step.peers else step for step in steps), **several)


GRAPH = Step(phase=Phase.CAPTURE, draft_len=3, generations=(Generation(request=None, past=4),) * 3)


def test_dummies_go_on_from_nothing_in_steps_that_follow_each_other() -> None:
    """PR #4853: a batch of one padded to three in two steps running."""
    padded = Step(phase=Phase.REPLAY, draft_len=3, generations=(ONE,), peers=(Peer(generations=3),))
    _, _, first, second = _ranked(GRAPH, STEPS[0], padded, padded)
    for step in (first, second):
        assert step["prepared"]["previous_batch_indices"] == [0, -1, -1]
        assert step["prepared"]["previous_kv_lens_offsets_cuda"][1:] == [0, 0]
        assert step["prepared"]["kv_lens_cuda"][1:] == [4, 4]
        assert step["prepared"]["position_ids"][4:] == [0, 1, 2, 3] * 2
    assert first["prepared"]["previous_kv_lens_offsets_cuda"][0] == 1 - 4
    assert second["prepared"]["previous_kv_lens_offsets_cuda"][0] == 3 - 4
    # Nobody has their pages when the managers are updated: 10 tokens, 4 of two steps each, 1 rewound, in pages of 4.
    assert first["updated"]["free_blocks"] == CONFIG.num_blocks - 5


def test_all_that_ranks_run_belongs_to_the_step_that_launched_it() -> None:
    """Rank 0 counts a request that has ended; where no rank has anything to run, nothing is told."""
    busy = replace(STEPS[0], peers=(Peer(contexts=(6,)),), finish=(0,))
    wasted = Step(draft_len=3, generations=(ONE,), peers=(Peer(generations=2),))
    first, second, idle = _ranked(busy, wasted, Step(draft_len=3))
    assert first["updated"]["collectives"][:2] == [
        ["executor.batch", [1, 1]],
        ["attn_metadata.all_rank_num_tokens", [5, 6]],
    ]
    assert second["updated"]["collectives"][:2] == [
        ["executor.batch", [1, 2]],
        ["attn_metadata.all_rank_num_tokens", [4, 8]],
    ]
    assert idle == {}


def test_an_idle_rank_has_a_dummy_of_its_own() -> None:
    resting = Step(draft_len=3, peers=(Peer(generations=2),))
    _, second, third = _ranked(replace(STEPS[0], peers=(Peer(),)), resting, replace(STEPS[1], peers=(Peer(),)))
    assert second["prepared"]["request_ids"] == [None]
    assert second["prepared"]["previous_batch_indices"] == [-1]
    # Request 0 was not in that step, so that all of it is known.
    assert third["prepared"]["previous_batch_indices"] == [-1]
    assert third["prepared"]["kv_lens_cuda"] == [4, 5 + 4]


def test_compressed_tokens_are_counted_by_supposed_lengths_and_then_by_true_ones() -> None:
    compressed = {"index_topk": 2, "window_size": 3, "compress_ratios": (1, 2, 4)}
    step = run(*STEPS, attention_backend="DEEPSEEK_V4", **compressed)[2]
    prepared, entered = step["prepared"], step["entered"]
    # 3 and 5 known and 4 supposed of each; 1 and 3 are accepted, and 3 tokens are fed.
    assert prepared["cached_token_lens"] == [7, 9]
    assert entered["cached_token_lens"] == [4, 8]
    assert prepared["past_kv_lens"][4] == [1, 2]
    assert entered["past_kv_lens"][4] == [1, 2]
    assert prepared["new_comp_kv_lens"][2] == [5 - 3, 6 - 4]
    assert entered["new_comp_kv_lens"][2] == [3 - 2, 5 - 4]
    assert prepared["swa_local_indices"][0] == [5, 6, 7]
    assert entered["swa_local_indices"][0] == [2, 3, 4]
    assert prepared["slot_owners"] == [[0, 3], [0, 4], [1, 4], [1, 5]]
    assert entered["slot_owners"] == [[0, 2], [1, 4]]


def test_a_page_table_stays_as_long_as_the_host_has_supposed() -> None:
    step = run(*STEPS, attention_backend="FLASHINFER")[2]
    prepared, entered = step["prepared"], step["entered"]
    for moment in (prepared, entered):
        # 7 + 3 and 9 + 3 tokens, in pages of 4.
        assert moment["num_blocks"] == [3, 3]
        assert moment["_paged_kv_indptr"] == moment["_paged_kv_indptr_decode"] == [0, 3, 6]
    assert prepared["_cached_token_lens"] == [7, 9]
    assert entered["_cached_token_lens"] == [4, 8]
    assert prepared["_paged_kv_last_page_len"] == [2, 4]
    assert entered["_paged_kv_last_page_len"] == [3, 3]
    assert entered["_positions"] == entered["position_ids"] == [4, 5, 6, 8, 9, 10]
    assert step["draft[0]"]["_draft_kv_runtime_lens"] == [4 + 3, 8 + 3]


def test_a_graph_is_entered_with_the_page_table_and_the_lengths_of_the_host() -> None:
    start = Step(phase=Phase.CAPTURE, draft_len=3, generations=(Generation(request=None, past=4),))
    replayed = run(
        start, STEPS[0], Step(phase=Phase.REPLAY, draft_len=3, generations=(ONE,)), attention_backend="FLASHINFER"
    )[2]
    assert replayed["entered"]["_cached_token_lens"] == replayed["prepared"]["_cached_token_lens"] == [8]
    assert replayed["restored"]["position_ids"] == [5, 6, 7, 8]
