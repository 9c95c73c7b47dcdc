"""Verify widths in the portable engine: rows side by side, what is told of them, what a step in flight gives back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the portable engine needs torch")

import torch

from engines.base import run
from engines.portable import PortableEngine
from engines.portable.attention.backends import ragged
from scenarios import Phase, Scenario, StepTrace, Trace
from tests.museum.ragged_cases import widths


def ints(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def go(scenario: Scenario) -> Trace:
    return run(PortableEngine(), scenario)


def at(step: StepTrace, name: str) -> Any:
    found = step.find(name)
    assert found is not None
    return found


def test_rows_lie_side_by_side_and_go_back() -> None:
    rows, counts = ints([10, 20, 21, 22, 30, 31]), ints([1, 3, 2])
    table = ragged.padded(rows, counts, 3)
    assert table.tolist() == [[10, 10, 10], [20, 21, 22], [30, 31, 31]]
    assert ragged.flat(table, counts, 6).tolist() == rows.tolist()
    assert ragged.generation_of(counts, 6).tolist() == [0, 1, 1, 1, 2, 2]


def test_a_generation_without_rows_has_padding_alone() -> None:
    assert ragged.padded_with(-1, ints([20, 21]), ints([0, 2]), 2).tolist() == [[-1, -1], [20, 21]]
    assert ragged.padded_with(-1, ints([]), ints([0, 0]), 2).tolist() == [[-1, -1], [-1, -1]]


def test_wrong_widths_reach_nothing_outside() -> None:
    assert ragged.padded(ints([1, 2]), ints([4, 4]), 4).shape == (2, 4)
    assert ragged.flat(ints([[1, 2], [3, 4]]), ints([1, 1]), 5).tolist()[:2] == [1, 3]


def test_single_rows_count_back_from_the_length_of_their_request() -> None:
    step = go(widths("Eagle3OneModelWorker", attention_backend="DSA", index_topk=2)).steps[3]
    entered = at(step, "entered")
    # They verify 1 and 2 drafts.
    first, second = entered["kv_lens_cuda"]
    assert entered["row_req_idx_cuda"] == [0, 0, 1, 1, 1]
    assert entered["row_kv_lens_cuda"] == [first - 1, first, second - 2, second - 1, second]
    assert entered["gen_token_repeats_cuda"] == [2, 3]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_gives_back_what_it_was_granted_itself(overlap: bool) -> None:
    """Not what the step that was launched since was granted."""
    steps = go(widths("DraftTargetOneModelWorker", overlap=overlap)).steps
    for step in steps[3:-1]:
        lens = at(step, "prepared")["ragged_verify_lens"]
        requests, accepted = at(step, "prepared")["request_ids"], at(step, "restored")["new_tokens_lens"]
        expected = {r: n - count for r, n, count in zip(requests, lens, accepted)}
        assert at(step, "updated")["py_rewind_len"] == expected


def test_a_graph_replays_widths_of_the_sum_that_it_was_captured_with() -> None:
    case = widths("MTPEagleWorker")
    captured, _, *_, replayed = (case.steps[i] for i in (1, 2, 7))
    assert [g.verify for g in captured.generations] != [g.verify for g in replayed.generations]
    graphs = go(case)
    assert at(graphs.steps[7], "restored")["next_draft_tokens"] == _eager(case, 7)["next_draft_tokens"]


def _eager(case: Scenario, index: int) -> Any:
    """The same step of the same run, by Python."""
    steps = [replace(s, phase=Phase.EAGER) if s.phase is Phase.REPLAY else s for s in case.steps]
    return at(go(replace(case, steps=tuple(steps))).steps[index], "restored")
