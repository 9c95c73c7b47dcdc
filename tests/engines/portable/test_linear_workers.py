"""The linear draft loop, state by state: Eagle3, MTP-Eagle, DraftTarget."""

from __future__ import annotations

from typing import Any

import pytest

from engines.portable.graphs import CpuGraph
from tests.engines.portable.support import LINEAR, Batch, state

DRAFT_TARGET = "DraftTargetOneModelWorker"


@pytest.mark.parametrize("worker", LINEAR)
def test_worked_example(worker: str) -> None:
    """A context of 5, generations with 10 and 20 cached that accept 3 and 2 tokens, K = 3."""
    batch = Batch(worker)
    before = state(batch.attn)
    originals = batch.attn._seq_lens, batch.attn._seq_lens_cuda, batch.attn.kv_lens_cuda
    outputs = batch.forward()

    first, second, third = batch.draft_model.calls
    assert before["kv"] == [5, 14, 24]
    assert {k: first[k] for k in before} == before
    assert first["counters"] == (1, 5, 2, 13)
    assert first["position_ids"] == [*range(5), *range(10, 14), *range(20, 24)]
    # The prompt 1..5 shifted, then the target's token 40; then all four target tokens of each generation.
    assert first["input_ids"] == [2, 3, 4, 5, 40, *range(41, 49)]
    assert first["gathered"] == [4, 7, 10]
    later = {"seq_lens": [1] * 3, "seq_lens_cuda": [1] * 3, "counters": (0, 0, 3, 3), "types": [1] * 3}
    for call, kv, positions, ids in (
        (second, [6, 14, 23], [5, 13, 22], [10, 11, 12]),
        (third, [7, 15, 24], [6, 14, 23], [20, 21, 22]),
    ):
        assert {k: call[k] for k in later} == later
        assert call["use_spec_decoding"] is False
        assert call["kv"] == kv
        assert call["position_ids"] == positions == [n - 1 for n in kv]
        assert call["input_ids"] == ids
        assert call["gathered"] == [0, 1, 2]

    assert state(batch.attn) == before | {"kv": [8, 16, 25]}
    assert (batch.attn._seq_lens, batch.attn._seq_lens_cuda, batch.attn.kv_lens_cuda) == originals
    assert outputs["new_tokens_lens"].tolist() == [1, 3, 2]
    assert outputs["new_tokens"].tolist()[1:] == [[41, 42, 43, 44], [45, 46, 47, 48]]
    assert outputs["next_draft_tokens"].tolist() == [[10, 20, 30], [11, 21, 31], [12, 22, 32]]
    assert outputs["next_new_tokens"][:, 0].tolist() == [40, 43, 46]


@pytest.mark.parametrize("worker", LINEAR)
def test_hidden_states_follow_the_gathered_rows(worker: str) -> None:
    batch = Batch(worker)
    if worker == "Eagle3OneModelWorker":
        batch.spec.hidden_states[:13, 0] = batch.arguments["hidden_states"][:, 0]
    batch.forward()
    fed: list[Any] = [call.get("hidden_states") for call in batch.draft_model.calls]
    if worker == DRAFT_TARGET:
        assert fed == [None] * 3
    else:
        assert [hidden[::2] for hidden in fed] == [list(range(13)), [4, 7, 10], [0, 1, 2]]


@pytest.mark.parametrize("worker", LINEAR[:2])
def test_later_drafts_count_one_token_per_sequence_on_each_rank(worker: str) -> None:
    batch = Batch(worker)
    batch.spec.all_rank_num_tokens, batch.spec.subseq_all_rank_num_tokens = [13, 9], [3, 2]
    batch.forward()
    assert [call["all_rank_num_tokens"] for call in batch.draft_model.calls] == [[13, 9], [3, 2], [3, 2]]


@pytest.mark.parametrize("worker", LINEAR)
@pytest.mark.parametrize(
    ("prompts", "pasts", "accepted", "draft_len", "end"),
    [
        ((), (4, 9, 30), (1, 4, 2), 3, [8, 16, 35]),
        ((3, 2), (), (), 3, [6, 5]),
        ((2, 1, 4), (6,), (2,), 1, [3, 2, 5, 9]),
        ((1,), (7,), (5,), 4, [5, 16]),
    ],
)
def test_closed_form_of_kv_lens(
    worker: str,
    prompts: tuple[int, ...],
    pasts: tuple[int, ...],
    accepted: tuple[int, ...],
    draft_len: int,
    end: list[int],
) -> None:
    batch = Batch(worker, prompts=prompts, pasts=pasts, accepted=accepted, draft_len=draft_len)
    outputs = batch.forward()
    assert state(batch.attn)["kv"] == end
    assert len(batch.draft_model.calls) == draft_len
    assert outputs["new_tokens_lens"].tolist() == [1] * len(prompts) + list(accepted)
    for call in batch.draft_model.calls[1:]:
        assert call["position_ids"] == [n - 1 for n in call["kv"]]


@pytest.mark.parametrize("worker", LINEAR)
def test_without_drafts_the_drafter_is_fed_and_nothing_else_happens(worker: str) -> None:
    """A step that the drafter misses leaves a hole in its cache (PR #16888)."""
    batch = Batch(worker, accepted=(1, 1), draft_len=0)
    batch.attn.prepare_for_spec_dec = None
    before = state(batch.attn)
    outputs = batch.forward()
    (call,) = batch.draft_model.calls
    assert call["input_ids"] == [2, 3, 4, 5, 40, 41, 42]
    assert call["position_ids"] == [0, 1, 2, 3, 4, 10, 20]
    assert state(batch.attn) == before
    shapes = {name: list(outputs[name].shape) for name in outputs if name != "logits"}
    assert shapes == {
        "new_tokens": [3, 1], "new_tokens_lens": [3], "next_draft_tokens": [3, 0], "next_new_tokens": [3, 1]
    }  # fmt: skip


@pytest.mark.parametrize(("capturing", "end"), [(False, [14, 24]), (True, [16, 25])])
def test_draft_target_gives_kv_lens_back_while_a_graph_warms_up(
    capturing: bool, end: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(DRAFT_TARGET, prompts=(), graph=True)
    original = batch.attn.kv_lens_cuda
    monkeypatch.setattr(CpuGraph, "recording", capturing)
    batch.forward()
    assert [call["kv"] for call in batch.draft_model.calls] == [[14, 24], [14, 23], [15, 24]]
    assert state(batch.attn)["kv"] == end
    assert batch.attn.kv_lens_cuda is original


@pytest.mark.parametrize("worker", LINEAR[:2])
def test_eagle_moves_kv_lens_in_every_phase(worker: str) -> None:
    """Nothing puts them back between the forwards of a graph's warm-up but the graph runner (PR #11696)."""
    batch = Batch(worker, prompts=(), graph=True)
    ends = []
    for _ in range(3):
        batch.forward()
        ends.append(state(batch.attn)["kv"])
    assert ends == [[16, 25], [18, 26], [20, 27]]
