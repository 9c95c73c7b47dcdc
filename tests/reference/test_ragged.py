"""The oracle where generations verify different numbers of drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import reference
from scenarios import Config, Context, Generation, Request, Scenario, Step, check
from scenarios.tracer import NO_PROPOSAL, PAD_TOKEN

EAGLE = "Eagle3OneModelWorker"
CONFIG = Config(worker=EAGLE, max_draft_len=3, num_blocks=40, ragged_verify=True)
REQUESTS = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=3))


def generation(request: int, verify: int | None, agree: int = 3) -> Generation:
    return Generation(request=request, verify=verify, agree=agree)


PROMPTS = Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=3), Context(request=1, chunk=3, agree=3)))
STEPS = (
    PROMPTS,
    Step(draft_len=3, generations=(generation(1, 3, agree=2), generation(0, 0))),
    Step(draft_len=3, generations=(generation(0, 1, agree=2), generation(1, 2, agree=1))),
)


def run(*steps: Step, **changes: Any) -> tuple[Any, ...]:
    """Sub-steps of each step by name."""
    scenario = check(Scenario(config=replace(CONFIG, **changes), requests=REQUESTS, steps=steps))
    return tuple({s.name: s for s in step.substeps} for step in reference.trace(scenario).steps)


PLAIN, LATE = run(*STEPS), run(*STEPS, overlap=True)
SPARSE = run(*STEPS, overlap=True, attention_backend="DSA", index_topk=8)


def test_a_generation_feeds_what_it_verifies_and_one_token_more() -> None:
    """After prompts of 5 and 3 tokens, request 1 accepts all of 3 drafts, request 0 has none to accept."""
    prepared = PLAIN[1]["prepared"]
    made = PLAIN[0]["restored"]["next_draft_tokens"]
    assert prepared["_seq_lens"] == prepared["ragged_verify_lens"] == prepared["gen_token_repeats_cuda"] == [4, 1]
    assert prepared["kv_lens_cuda"] == [7, 6]
    assert prepared["position_ids"] == [3, 4, 5, 6, 5]
    assert prepared["gather_ids"] == [0, 1, 2, 3, 4]
    assert prepared["draft_tokens"] == made[1]
    assert prepared["spec_decoding_generation_lengths"] == [4, 1]
    assert prepared["spec_decoding_position_offsets"] == [[0, 1, 2, 3], [0]]
    assert (prepared["runtime_draft_len"], prepared["runtime_tokens_per_gen_step"]) == (3, 4)
    assert PLAIN[1]["verified"]["num_accepted_tokens"] == [4, 1]


def test_the_first_of_its_drafts_are_verified_and_the_rest_is_lost() -> None:
    """All 3 drafts of request 0 agree, and 1 is verified; of request 1 two do."""
    made, prepared = PLAIN[1]["restored"]["next_draft_tokens"], PLAIN[2]["prepared"]
    assert prepared["draft_tokens"] == [*made[1][:1], *made[0][:2]]
    assert PLAIN[2]["verified"]["num_accepted_tokens"] == [2, 3]
    assert PLAIN[2]["prepared"]["kv_lens_cuda"] == [6 + 2, 7 + 3]


def test_drafts_are_made_for_each_row_as_for_any_other() -> None:
    lens = [PLAIN[2][f"draft[{i}]"]["kv_lens_cuda"] for i in range(3)]
    assert lens == [[8, 10], [9, 11], [10, 12]]
    assert PLAIN[2]["restored"]["kv_lens_cuda"] == [11, 13]
    assert [len(drafts) for drafts in PLAIN[2]["restored"]["next_draft_tokens"]] == [3, 3]


def test_a_row_that_verifies_more_than_was_made_feeds_placeholders() -> None:
    steps = run(replace(PROMPTS, draft_len=1, contexts=(Context(request=0, chunk=5, agree=1),)),
                Step(draft_len=3, generations=(generation(0, 2),)))  # fmt: skip
    made = steps[0]["restored"]["next_draft_tokens"]
    assert steps[1]["prepared"]["draft_tokens"] == [*made[0], PAD_TOKEN]


def test_room_is_granted_and_given_back_by_its_own_width() -> None:
    """A first chunk is granted its prompt, 2 extra tokens and 3 drafts."""
    assert [step["updated"]["kv_tokens"] for step in PLAIN] == [{0: 10, 1: 8}, {0: 11, 1: 12}, {0: 13, 1: 15}]
    assert [step["updated"]["py_rewind_len"] for step in PLAIN] == [{}, {0: 0, 1: 0}, {0: 0, 1: 0}]
    rejecting = run(PROMPTS, Step(draft_len=3, generations=(generation(0, 2, agree=0), generation(1, 1))),
                    Step(draft_len=3, generations=(generation(0, 2), generation(1, 0))))  # fmt: skip
    assert rejecting[2]["updated"]["py_rewind_len"] == {0: 2, 1: 0}
    assert rejecting[2]["updated"]["kv_tokens"] == {0: 10 + 3 + 3 - 2, 1: 8 + 2 + 1}


@pytest.mark.parametrize(
    ("step", "host", "true", "offsets", "positions"),
    [
        # Of a prompt the host counts 4 rows that may be accepted, whatever comes next verifies; 1 was.
        (1, [2 + 4 + 4, 4 + 4 + 1], [7, 6], [-3, -3], [1] * 5),
        # Of the generations their own 1 and 4.
        (2, [5 + 1 + 2, 3 + 4 + 3], [8, 10], [0, 0], [1, 1, 4, 4, 4]),
    ],
)
def test_what_is_corrected_is_each_rows_own_width(
    step: int, host: list[int], true: list[int], offsets: list[int], positions: list[int]
) -> None:
    prepared, entered = LATE[step]["prepared"], LATE[step]["entered"]
    assert prepared["kv_lens_cuda"] == host
    assert prepared["previous_kv_lens_offsets_cuda"] == offsets
    assert prepared["previous_pos_id_offsets_cuda"] == positions
    assert entered["kv_lens_cuda"] == true
    assert [s["restored"]["new_tokens"] for s in LATE] == [s["restored"]["new_tokens"] for s in PLAIN]


def test_each_row_sees_its_request_up_to_itself() -> None:
    """By the host's lengths when it is prepared, then by the true ones."""
    step = SPARSE[1]
    assert step["prepared"]["row_kv_lens_cuda"] == [7, 8, 9, 10, 9]
    for name in ("entered", "draft[0]"):
        assert step[name]["row_req_idx_cuda"] == [0, 0, 0, 0, 1]
        assert step[name]["row_kv_lens_cuda"] == [4, 5, 6, 7, 6]
    assert "row_kv_lens_cuda" not in step["draft[1]"]
    assert SPARSE[2]["entered"]["row_kv_lens_cuda"] == [7, 8, 8, 9, 10]
    assert step["prepared"]["max_gen_seq_len"] == 4
    assert "kv_lens_expanded_cuda" not in step["prepared"]
    assert "row_kv_lens_cuda" not in LATE[1]["prepared"]


def test_rows_of_generations_are_counted_behind_contexts() -> None:
    steps = run(
        replace(PROMPTS, contexts=PROMPTS.contexts[:1]),
        Step(draft_len=3, contexts=PROMPTS.contexts[1:], generations=(generation(0, 2),)),
        attention_backend="DSA",
        index_topk=8,
    )
    assert steps[1]["entered"]["row_req_idx_cuda"] == [1, 1, 1]
    assert steps[1]["draft[0]"]["row_kv_lens_cuda"] == [6, 7, 8]


def test_as_many_states_and_proposals_as_there_are_rows_and_drafts_to_verify() -> None:
    steps = run(*STEPS, recurrent=True, rejection_sampling=True)
    verified, left = steps[2]["verified"], steps[1]["restored"]["draft_probs"]
    assert [len(states) for states in verified["intermediate_ssm_states"]] == [2, 3]
    assert verified["draft_probs"] == [left[1][:1], left[0][:2]]
    assert steps[1]["verified"]["draft_probs"][1] == []
    assert steps[1]["restored"]["rejection_rows"] == 2
    assert steps[2]["updated"]["recurrent_states"].keys() == {0, 1}
    grown = run(replace(PROMPTS, draft_len=1, contexts=(Context(request=0, chunk=5, agree=1),)),
                Step(draft_len=3, generations=(generation(0, 2),)), rejection_sampling=True)  # fmt: skip
    assert grown[1]["verified"]["draft_probs"][0][1:] == [NO_PROPOSAL]


@pytest.mark.parametrize("worker", [EAGLE, "MTPEagleWorker", "DraftTargetOneModelWorker", "SAWorker"])
def test_text_does_not_depend_on_widths(worker: str) -> None:
    def text(steps: tuple[Any, ...], request: int) -> list[int]:
        emitted: list[int] = steps[-1]["updated"]["emitted"][request]
        return emitted

    all_of_them = [replace(s, generations=tuple(replace(g, verify=None) for g in s.generations)) for s in STEPS]
    ragged, plain = run(*STEPS, worker=worker), run(*all_of_them, worker=worker, ragged_verify=False)
    for request in (0, 1):
        given = text(ragged, request)
        assert given == text(plain, request)[: len(given)]
    assert len(text(ragged, 0)) < len(text(plain, 0))
    same = run(*all_of_them, worker=worker)
    assert [s["updated"] for s in same] == [s["updated"] for s in plain]


@pytest.mark.parametrize(
    ("worker", "count"), [(EAGLE, 5 - 2 * 3), ("MTPEagleWorker", 5), ("DraftTargetOneModelWorker", 5 - 2 * 3)]
)
def test_what_a_worker_announces_starts_from_the_tokens_that_are_fed(worker: str, count: int) -> None:
    """Upstream takes off a longest draft (Eagle3) or the step's (DraftTarget) per generation, verified or not."""
    assert run(*STEPS, worker=worker)[1]["prepared"]["spec_num_tokens"] == count
