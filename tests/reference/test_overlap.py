"""The oracle under the overlap scheduler: lengths that the host supposes, updates that come a step late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import reference
from scenarios import Config, Context, Fault, FaultKind, Generation, Phase, Request, Scenario, Step, check

CONFIG = Config(worker="Eagle3OneModelWorker", max_draft_len=3, num_blocks=40, overlap=True)
REQUESTS = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=4))
ONE, OTHER = Generation(request=0, agree=2), Generation(request=1, agree=1)
STEPS = (
    Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=2),)),
    Step(draft_len=3, contexts=(Context(request=1, chunk=4, agree=1),), generations=(ONE,)),
    # They change places, at another draft length; 0 ends, which the next step does not know.
    Step(draft_len=1, generations=(OTHER, replace(ONE, agree=1)), finish=(0,)),
    Step(draft_len=2, generations=(ONE, OTHER)),
    Step(draft_len=3, generations=(OTHER,)),
)
CORRECTIONS = ("previous_batch_indices", "previous_kv_lens_offsets_cuda", "previous_pos_id_offsets_cuda")


def run(*steps: Step, **changes: Any) -> tuple[Any, ...]:
    """Sub-steps of each step by name."""
    scenario = check(Scenario(config=replace(CONFIG, **changes), requests=REQUESTS, steps=steps))
    return tuple({s.name: s for s in step.substeps} for step in reference.trace(scenario).steps)


LATE = run(*STEPS)


@pytest.mark.parametrize(
    ("step", "host", "true", "offsets"),
    [
        (0, [5], [5], []),
        # Of a prompt the last token counts as one that may be accepted: 4 known, 4 supposed, 4 fed; 1 accepted.
        (1, [4, 12], [4, 9], [-3]),
        # 3 and 5 known, 4 supposed of each, 2 fed.
        (2, [9, 11], [6, 10], [-3, -1]),
        # 8 and 4 known, 2 of 2 accepted each.
        (3, [13, 9], [13, 9], [0, 0]),
        (4, [13], [12], [-1]),
    ],
)
def test_lengths_are_supposed_and_corrected(step: int, host: list[int], true: list[int], offsets: list[int]) -> None:
    prepared, entered = LATE[step]["prepared"], LATE[step]["entered"]
    assert prepared["kv_lens_cuda"] == prepared["kv_lens_runtime"] == host
    assert prepared["kv_lens"] == [kv + 2 for kv in host]
    assert prepared["previous_kv_lens_offsets_cuda"] == offsets
    assert entered["kv_lens_cuda"] == true


def test_positions_go_up_by_what_was_accepted() -> None:
    prepared, entered, restored = (LATE[2][name] for name in ("prepared", "entered", "restored"))
    assert prepared["position_ids"] == [3, 4, 5, 6]
    assert prepared["previous_pos_id_offsets_cuda"] == [1, 1, 3, 3]
    assert entered["position_ids"] == restored["position_ids"] == [4, 5, 8, 9]


def test_a_row_goes_on_from_its_own_requests_row() -> None:
    assert [step["prepared"]["previous_batch_indices"] for step in LATE] == [[], [0], [0, 1], [1, 0], [1]]


def test_text_drafts_and_caches_are_those_without_it() -> None:
    """But for the row that is wasted."""
    plain = run(*STEPS[:3], replace(STEPS[3], generations=(OTHER,)), STEPS[4], overlap=False)
    for mine, other in zip(LATE, plain, strict=True):
        for field in ("emitted", "target_kv", "draft_kv", "py_rewind_len", "py_num_accepted_draft_tokens"):
            assert mine["updated"][field] == other["updated"][field]


def test_ledgers_hold_what_the_next_step_was_granted() -> None:
    """A first chunk has room for 2 extra tokens and 3 drafts at any draft length; 0 is fed once more after its end."""
    tokens = [step["updated"]["kv_tokens"] for step in LATE]
    assert tokens == [
        {0: 10 + 4, 1: 9},
        {0: 14 - 1 + 2, 1: 9 + 2},
        {0: 15 + 3, 1: 11 + 3},
        {1: 14 - 1 + 4},
        {1: 17 - 2},
    ]


def test_a_request_that_has_ended_takes_nothing_from_the_step_in_flight() -> None:
    assert LATE[3]["prepared"]["request_ids"] == [0, 1]
    assert LATE[3]["restored"]["new_tokens_lens"] == [2, 2]
    updated = LATE[3]["updated"]
    assert [sorted(updated[name]) for name in ("emitted", "py_rewind_len", "target_kv")] == [[1]] * 3


def test_a_request_that_was_left_out_is_known() -> None:
    both = Step(draft_len=3, contexts=STEPS[0].contexts + STEPS[1].contexts)
    steps = run(both, Step(draft_len=3, generations=(ONE,)), Step(draft_len=3, generations=(OTHER, ONE)))
    prepared = steps[2]["prepared"]
    assert prepared["previous_batch_indices"] == [-1, 0]
    assert prepared["previous_kv_lens_offsets_cuda"] == [0, -1]
    assert prepared["kv_lens_cuda"] == [4 + 4, 5 + 4 + 4]


def test_an_iteration_without_rows_only_waits() -> None:
    steps = run(STEPS[0], Step(draft_len=3), Step(draft_len=3, generations=(ONE,)))
    assert steps[0]["updated"]["kv_tokens"] == {0: 10}
    assert steps[1] == {}
    assert steps[2]["prepared"]["previous_batch_indices"] == [-1]
    assert steps[2]["prepared"]["kv_lens_cuda"] == [5 + 4]


def test_a_failure_ends_what_is_in_flight() -> None:
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.OOM)
    steps = run(
        STEPS[0], Step(draft_len=3, generations=(ONE,), fault=fault), Step(draft_len=3, contexts=STEPS[1].contexts)
    )
    assert "updated" not in steps[0]
    assert "updated" not in steps[1]
    assert steps[1]["failed"]["kv_tokens"] == {}
    assert steps[1]["failed"]["free_blocks"] == CONFIG.num_blocks
    assert steps[2]["updated"]["emitted"].keys() == {1}


def test_a_graph_is_entered_with_the_lengths_of_the_host() -> None:
    start = Step(phase=Phase.CAPTURE, draft_len=3, generations=(Generation(request=None, past=4),))
    replay = Step(phase=Phase.REPLAY, draft_len=3, generations=(ONE,))
    captured, _, replayed = run(start, STEPS[0], replay)
    assert captured["prepared"]["previous_kv_lens_offsets_cuda"] == [0]
    assert replayed["entered"]["kv_lens_cuda"] == replayed["prepared"]["kv_lens_cuda"] == [4 + 4 + 4]
    assert replayed["entered"]["position_ids"] == [4, 5, 6, 7]
    assert replayed["restored"]["position_ids"] == [5, 6, 7, 8]
    assert replayed["restored"]["kv_lens_cuda"] == [9 + 3 - 1]


def test_a_sparse_backend_prepares_for_what_the_host_supposes() -> None:
    steps = run(*STEPS[:3], attention_backend="DSA", index_topk=13)
    prepared, entered = steps[2]["prepared"], steps[2]["entered"]
    assert prepared["slot_owners"] == [[0, 7], [0, 8], [1, 9], [1, 10]]
    assert entered["slot_owners"] == [[0, 4], [0, 5], [1, 8], [1, 9]]
    assert prepared["gen_kv_indptr"] == [0, 9, 20]
    # 11 tokens and 2 that the draft loop may add are too many to do without an indexer, though there are only 10.
    assert prepared["skip_indexer_for_gen_reqs"] is entered["skip_indexer_for_gen_reqs"] is False


def test_trees_are_laid_out_from_corrected_positions() -> None:
    steps = run(
        *(Step(draft_len=3, contexts=(Context(request=0, chunk=5),)), *(Step(draft_len=3, generations=(ONE,)),) * 2),
        worker="Eagle3OneModelDynamicTreeWorker", dynamic_tree_max_topK=2, max_total_draft_tokens=7,
    )  # fmt: skip
    prepared, entered = steps[2]["prepared"], steps[2]["entered"]
    assert prepared["kv_lens_cuda"] == [5 + 8 + 8]
    assert prepared["previous_kv_lens_offsets_cuda"] == [1 - 8]
    assert [b - a for a, b in zip(prepared["position_ids"], entered["position_ids"], strict=True)] == [1] * 8
