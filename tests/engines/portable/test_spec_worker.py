"""The template around a worker's forward: guard, pairing, cleanup; and what all workers do with tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engines.portable.speculative.interface import SpecWorkerBase
from tests.engines.portable.support import Batch, attention_metadata, ints, state

EAGLE, PARD = "Eagle3OneModelWorker", "PARDWorker"


class Boom(Exception):
    """Raised by a test."""


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Boom


def fail_at(function: Callable[..., Any], occurrence: int) -> Callable[..., Any]:
    """``function``, with one call that fails."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == occurrence:
            raise Boom
        return function(*args, **kwargs)

    return call


def test_a_class_that_overrides_forward_cannot_be_created() -> None:
    with pytest.raises(TypeError, match="Careless overrides forward, which cleans up; implement _forward_impl"):
        type("Careless", (SpecWorkerBase,), {"forward": fail})


@pytest.mark.parametrize("missing", ["_forward_impl", "max_draft_len"])
def test_a_worker_needs_a_body_and_a_draft_length(missing: str) -> None:
    members = {"_forward_impl": fail, "max_draft_len": 1}
    assert type("Whole", (SpecWorkerBase,), dict(members))()
    del members[missing]
    with pytest.raises(TypeError, match=missing):
        type("Part", (SpecWorkerBase,), members)()


@pytest.fixture
def batch() -> Batch:
    return Batch(EAGLE)


def test_prepare_and_restore_are_paired(batch: Batch) -> None:
    worker, attn = batch.worker, batch.attn
    with pytest.raises(AssertionError, match="requires a paired prepare"):
        worker._restore_attn_metadata_from_spec_dec(attn)
    worker._prepare_attn_metadata_for_spec_dec(attn)
    with pytest.raises(AssertionError, match="must be paired"):
        worker._prepare_attn_metadata_for_spec_dec(attn)
    with pytest.raises(AssertionError, match="the same object"):
        worker._restore_attn_metadata_from_spec_dec(attention_metadata())
    worker._restore_attn_metadata_from_spec_dec(attn)
    with pytest.raises(AssertionError, match="requires a paired prepare"):
        worker._restore_attn_metadata_from_spec_dec(attn)


def test_restore_brings_back_contexts_types_and_counters(batch: Batch) -> None:
    worker, attn = batch.worker, batch.attn
    before, types = state(attn), attn.host_request_types
    worker._prepare_attn_metadata_for_spec_dec(attn)
    attn._seq_lens.fill_(1)
    attn._seq_lens_cuda.fill_(1)
    attn.host_request_types.fill_(1)
    attn.num_contexts = 0
    worker._restore_attn_metadata_from_spec_dec(attn)
    assert state(attn) == before
    assert before["counters"] == (1, 5, 2, 13)
    assert attn.host_request_types is types


def test_a_prepare_that_fails_rolls_back(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, attn = batch.worker, batch.attn
    original = attn._seq_lens
    monkeypatch.setattr(worker, "_fields_to_save", lambda attn: ("_seq_lens", "no_such_field"))
    with pytest.raises(AttributeError, match="no_such_field"):
        worker._prepare_attn_metadata_for_spec_dec(attn)
    assert attn._seq_lens is original
    assert not attn.has_spec_dec_saved_state
    monkeypatch.undo()
    worker._prepare_attn_metadata_for_spec_dec(attn)


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("worker", [EAGLE, PARD])
def test_a_failure_is_cleaned_up_and_passed_on(worker: str, by_keyword: bool, caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch(worker)
    originals = batch.attn._seq_lens, batch.attn._seq_lens_cuda, batch.attn.kv_lens_cuda
    before = state(batch.attn)
    batch.draft_model.note = fail  # type: ignore[method-assign]
    arguments = batch.arguments
    with caplog.at_level(logging.WARNING), pytest.raises(Boom):
        batch.worker(**arguments) if by_keyword else batch.worker(*arguments.values())
    after = state(batch.attn)
    kv0, accepted = before.pop("kv"), [3, 2]
    kv = [kv0[0], *(n + acc for n, acc in zip(kv0[1:], accepted))] if worker == PARD else kv0
    assert after.pop("kv") == kv
    assert after == before
    assert (batch.attn._seq_lens, batch.attn._seq_lens_cuda, batch.attn.kv_lens_cuda) == originals
    assert [record.getMessage() for record in caplog.records] == [
        f"{worker} failed while drafting; its attention metadata is restored"
    ]


def test_success_logs_nothing(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        batch.forward()
    assert not caplog.records


@pytest.mark.parametrize("worker", [EAGLE, PARD])
def test_a_hook_that_fails_while_restoring_leaves_no_stale_counters(worker: str) -> None:
    """Upstream has forgotten what it saved by then, and keeps the counters of the draft phase."""
    clean = Batch(worker)
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1

    clean.attn.on_update = counted
    clean.forward()
    batch = Batch(worker)
    before = state(batch.attn)
    batch.attn.on_update = fail_at(batch.attn.on_update, calls)
    with pytest.raises(Boom):
        batch.forward()
    assert state(batch.attn)["counters"] == before["counters"] == (1, 5, 2, 5 + 2 * batch.attn._seq_lens[1])
    assert state(batch.attn)["types"] == before["types"]
    assert not batch.attn.has_spec_dec_saved_state


def test_even_a_cleanup_that_fails_lets_the_next_forward_prepare(batch: Batch) -> None:
    original = batch.attn._seq_lens
    batch.draft_model.note = fail  # type: ignore[method-assign]
    batch.attn.on_update = fail
    with pytest.raises(Boom):
        batch.forward()
    assert batch.attn._seq_lens is original
    del batch.attn.on_update, batch.draft_model.note
    batch.prepare()
    assert batch.forward()["next_draft_tokens"].tolist() == Batch(EAGLE).forward()["next_draft_tokens"].tolist()


def test_the_logits_that_come_out_are_the_object_that_went_in(batch: Batch) -> None:
    assert batch.forward()["logits"] is batch.arguments["logits"]


def test_acceptance_counts_the_agreeing_prefix(batch: Batch) -> None:
    batch.spec.draft_tokens = ints([7, 8, 9, 4, 3, 2])
    rows = torch.tensor([1, 7, 8, 5, 6, 9, 3, 2, 1])
    accepted, counts = batch.worker.sample_and_accept_draft_tokens(
        torch.nn.functional.one_hot(rows), batch.attn, batch.spec
    )
    assert counts.tolist() == [1, 3, 1]
    assert accepted.tolist() == [[1, 0, 0, 0], [7, 8, 5, 6], [9, 3, 2, 1]]
    assert accepted.dtype == counts.dtype == torch.int32


def test_next_new_tokens_start_with_the_last_accepted_one(batch: Batch) -> None:
    accepted = ints([[50, 0, 0, 0], [7, 8, 5, 6], [9, 4, 2, 1]])
    drafts = ints([[1, 2, 3], [11, 12, 13], [21, 22, 23]])
    result = batch.worker._prepare_next_new_tokens(accepted, ints([1, 3, 2]), drafts)
    assert result.tolist() == [[50, 1, 2, 3], [5, 11, 12, 13], [4, 21, 22, 23]]


def test_context_tokens_are_shifted_and_end_with_what_comes_next() -> None:
    batch = Batch(EAGLE, prompts=(3, 2), pasts=(), accepted=())
    ids, accepted = ints([11, 12, 13, 21, 22]), ints([[14], [23]])
    shifted = batch.worker._prepare_context_input_ids(ids, batch.attn, batch.spec, accepted)
    assert shifted.tolist() == [12, 13, 14, 22, 23]
    batch.spec.context_prompt_lookahead_tokens[0] = 99
    shifted = batch.worker._prepare_context_input_ids(ids, batch.attn, batch.spec, accepted)
    assert shifted.tolist() == [12, 13, 99, 22, 23]
    assert ids.tolist() == [11, 12, 13, 21, 22]
