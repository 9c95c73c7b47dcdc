"""DFlash and DSpark: contexts that grow and come back, and the block that is drafted behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.portable.graphs import CpuGraph
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from faults import TORCH, Sites
from scenarios import Fault, FaultKind
from tests.engines.portable.support import BLOCK, MASK, Batch, state

DFLASH, DSPARK = BLOCK


def context(batch: Batch, slot: int) -> list[list[int]]:
    """Columns of a slot: positions and values."""
    length = batch.worker._ctx_len[slot]
    return [batch.worker._ctx_k_buf[slot, :length].tolist(), batch.worker._ctx_v_buf[slot, :length].tolist()]


def lengths(batch: Batch) -> list[int]:
    return batch.worker._ctx_len.tolist()  # type: ignore[no-any-return]


def test_worked_example() -> None:
    """A context of 5, generations with 10 and 20 cached that accept 3 and 2 tokens, K = 3."""
    batch = Batch(DFLASH)
    before = state(batch.attn)
    outputs = batch.forward()
    (call,) = batch.draft_model.calls
    assert before["kv"] == [5, 14, 24]
    assert call["kv"] == [5, 15, 25]
    assert call["seq_lens"] == call["seq_lens_cuda"] == [5, 4, 4]
    assert call["counters"] == (1, 5, 2, 13)
    assert call["input_ids"] == [43, *[MASK] * 3, 46, *[MASK] * 3]
    assert call["query_positions"] == [13, 14, 15, 16, 22, 23, 24, 25]
    assert (call["num_ctx_per_req"], call["ctx_cache_batch_idx"]) == ([13, 22], [0, 1])
    assert call["gathered"] == [1, 2, 3, 5, 6, 7]
    assert state(batch.attn) == before | {"kv": [5, 17, 26]}
    assert lengths(batch) == [13, 22, 5, 0, 0]
    assert context(batch, 2) == [[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]]
    # Rows 5 to 8 are the first generation's: the three that are accepted stand behind the ten columns it had.
    assert [part[10:] for part in context(batch, 0)] == [[10, 11, 12], [105, 106, 107]]
    assert [part[20:] for part in context(batch, 1)] == [[20, 21], [109, 110]]
    assert outputs["new_tokens_lens"].tolist() == [1, 3, 2]
    assert outputs["next_draft_tokens"].tolist() == [[0] * 3, [10, 11, 12], [13, 14, 15]]
    assert outputs["next_new_tokens"][:, 0].tolist() == [40, 43, 46]


def test_the_block_is_as_wide_as_the_longest_draft() -> None:
    batch = Batch(DFLASH, draft_len=1, max_draft_len=3, accepted=(2, 1))
    outputs = batch.forward()
    (call,) = batch.draft_model.calls
    assert call["seq_lens"] == call["seq_lens_cuda"] == [5, 4, 4]
    assert call["counters"] == (1, 5, 2, 9)
    assert call["query_positions"] == [12, 13, 14, 15, 21, 22, 23, 24]
    assert call["gathered"] == [1, 5]
    assert state(batch.attn)["kv"] == [5, 14, 23]
    assert outputs["next_draft_tokens"].shape == (3, 1)


def test_dspark_has_a_row_less_and_corrects_what_the_block_says() -> None:
    batch = Batch(DSPARK)
    outputs = batch.forward()
    (call,) = batch.draft_model.calls
    assert call["seq_lens"] == [5, 4, 4]
    assert call["input_ids"] == [43, MASK, MASK, 46, MASK, MASK]
    assert call["query_positions"] == [13, 14, 15, 22, 23, 24]
    assert call["gathered"] == [0, 1, 2, 3, 4, 5]
    assert outputs["next_draft_tokens"].tolist() == [[0] * 3, [11, 12, 13], [14, 15, 16]]
    assert state(batch.attn)["kv"] == [5, 17, 26]


def test_contexts_alone_draft_nothing_and_are_kept() -> None:
    batch = Batch(DFLASH, prompts=(3, 2), pasts=(), accepted=())
    outputs = batch.forward()
    assert batch.draft_model.calls == []
    assert state(batch.attn)["kv"] == [3, 2]
    assert lengths(batch)[:2] == [3, 2]
    assert context(batch, 1) == [[0, 1], [103, 104]]
    assert not outputs["next_draft_tokens"].any()


@pytest.mark.parametrize("worker", BLOCK)
def test_a_step_without_drafts_grows_the_contexts_and_touches_no_metadata(worker: str) -> None:
    batch = Batch(worker, draft_len=0, max_draft_len=3, accepted=(1, 1))
    before = state(batch.attn)
    outputs = batch.forward()
    assert batch.draft_model.calls == []
    assert state(batch.attn) == before
    assert lengths(batch)[:3] == [11, 21, 5]
    assert outputs["new_tokens"].tolist() == [[40], [41], [42]]
    assert outputs["next_draft_tokens"].shape == (3, 0)


def test_a_prompt_starts_anew_in_the_slot_of_another() -> None:
    batch = Batch(DFLASH)
    batch.worker._ctx_len[2] = 7
    batch.forward()
    assert lengths(batch)[2] == 5


def test_dummies_share_a_slot_that_stays_empty() -> None:
    batch = Batch(DFLASH, prompts=())
    assert batch.slots is not None
    for request in (10, 11):
        batch.slots.slot_manager.remove_slot(request)
    batch.spec.prepare()
    assert batch.spec.batch_to_slot[:2].tolist() == [4, 4]
    batch.forward()
    assert lengths(batch) == [10, 20, 0, 0, 0]
    assert batch.draft_model.calls[0]["num_ctx_per_req"] == [0, 0]


@pytest.mark.parametrize(("capturing", "kv", "ctx_len"), [(False, [14, 24], [10, 20]), (True, [17, 26], [13, 22])])
def test_nothing_moves_while_a_graph_warms_up(
    capturing: bool, kv: list[int], ctx_len: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(DFLASH, prompts=(), graph=True)
    original = batch.attn.kv_lens_cuda
    monkeypatch.setattr(CpuGraph, "recording", capturing)
    batch.forward()
    assert batch.draft_model.calls[0]["kv"] == [15, 25]
    assert batch.draft_model.calls[0]["num_ctx_per_req"] == [13, 22]
    assert state(batch.attn)["kv"] == kv
    assert batch.attn.kv_lens_cuda is original
    assert lengths(batch)[:2] == ctx_len
    assert not batch.worker._kv_rewind_pending
    assert not batch.worker._ctx_len_restore_pending


def test_a_capture_that_fails_is_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What puts lengths back would be recorded, too; no failure of a capture is survived."""
    batch = Batch(DFLASH, prompts=(), graph=True)
    monkeypatch.setattr(CpuGraph, "recording", True)
    with pytest.raises(torch.OutOfMemoryError), Sites() as sites:
        with sites.bracket(Fault(site="torch.zeros", occurrence=2, kind=FaultKind.OOM), []):
            batch.forward()
    assert lengths(batch)[:2] == [13, 22]
    assert not batch.worker._ctx_len_restore_pending


def test_lengths_that_are_wrong_do_no_harm_to_other_slots() -> None:
    batch = Batch(DFLASH)
    batch.worker._ctx_len[0] = 1000
    batch.forward()
    assert context(batch, 1)[0][20:] == [20, 21]


def attempt(batch: Batch, fault: Fault | None) -> dict[str, int]:
    with Sites() as sites, sites.bracket(fault, [] if fault else [TORCH]) as bracket:
        batch.forward()
    return bracket.counts


@pytest.mark.exhaustive(every=3, first=1)
@pytest.mark.parametrize("worker", BLOCK)
@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, {(5, 14, 24), (5, 17, 26)}),
        ({"prompts": (), "graph": True}, {(14, 24)}),
        ({"draft_len": 0, "max_draft_len": 3, "accepted": (1, 1)}, {(5, 11, 21)}),
    ],
)
def test_contexts_come_back_wherever_a_torch_call_fails(
    worker: str, options: dict[str, Any], ends: set[tuple[int, ...]]
) -> None:
    seen = set()
    for site, count in attempt(Batch(worker, **options), None).items():
        for occurrence in range(1, count + 1):
            batch = Batch(worker, **options)
            entry, before = lengths(batch), state(batch.attn)
            with pytest.raises(torch.OutOfMemoryError):
                attempt(batch, Fault(site=site, occurrence=occurrence, kind=FaultKind.OOM))
            assert lengths(batch) == entry, (site, occurrence)
            assert state(batch.attn) | {"kv": before["kv"]} == before
            seen.add(tuple(state(batch.attn)["kv"]))
            assert not batch.worker._kv_rewind_pending
            assert not batch.worker._ctx_len_restore_pending
    assert seen == ends


def test_nothing_stays_pending_when_the_cleanup_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream applies what is left to a later batch: its next step without drafts, which prepares nothing."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("lost")

    batch = Batch(DFLASH)
    entry = lengths(batch)
    monkeypatch.setattr(batch.draft_model, "dflash_forward", fails)
    monkeypatch.setattr(batch.attn, "restore_from_spec_dec", fails)
    with pytest.raises(RuntimeError, match="lost"):
        batch.forward()
    assert state(batch.attn)["kv"] == [5, 17, 26]
    assert lengths(batch) == entry
    assert not batch.worker._kv_rewind_pending
    assert not batch.worker._ctx_len_restore_pending


def test_slots_are_kept_until_a_request_ends() -> None:
    slots = SeqSlotManager(2)
    first, second, third = (LlmRequest(i, [1]) for i in (7, 8, 9))
    dummy = LlmRequest(5, [1], is_dummy=True)
    slots.add_dummy_requests([dummy])
    slots.prepare_resources(ScheduledRequests((dummy, first, second)))
    slots.prepare_resources(ScheduledRequests((), (second,)))
    assert slots.get_slots([7, 5, 8]) == [0, 2, 1]
    with pytest.raises(RuntimeError, match="request 9 needs a slot and none is free"):
        slots.prepare_resources(ScheduledRequests((third,)))
    slots.free_resources(first)
    slots.free_resources(first)
    slots.prepare_resources(ScheduledRequests((third,)))
    assert slots.get_slots([9, 7, 8]) == [0, 2, 1]
