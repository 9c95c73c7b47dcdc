"""PARD: inputs of its one forward, and the deferred rewind of the KV lengths."""

from __future__ import annotations

import pytest
import torch

from engines.portable.graphs import CpuGraph
from faults import TORCH, Sites
from scenarios import Fault, FaultKind
from tests.engines.portable.support import MASK, Batch, state

PARD = "PARDWorker"


def test_worked_example() -> None:
    """A context of 5, generations with 10 and 20 cached that accept 3 and 2 tokens, K = 3."""
    batch = Batch(PARD)
    before = state(batch.attn)
    outputs = batch.forward()
    (call,) = batch.draft_model.calls
    assert before["kv"] == [5, 16, 26]
    assert call["kv"] == [5, 17, 27]
    assert call["seq_lens"] == [5, 6, 6]
    assert call["counters"] == (1, 5, 2, 17)
    assert call["position_ids"] == [*range(5), *range(11, 17), *range(21, 27)]
    assert call["input_ids"] == [1, 2, 3, 4, 5, 41, 42, 43, *[MASK] * 3, 47, 48, *[MASK] * 4]
    assert call["gathered"] == [7, 8, 9, 12, 13, 14]
    assert state(batch.attn) == before | {"kv": [5, 19, 28]}
    assert outputs["new_tokens_lens"].tolist() == [1, 3, 2]
    assert outputs["next_draft_tokens"].tolist() == [[0] * 5, [10, 11, 12, 0, 0], [13, 14, 15, 0, 0]]
    assert outputs["next_new_tokens"][:, 0].tolist() == [40, 43, 48]
    assert outputs["new_tokens"].shape == (3, 6)


def test_a_batch_of_contexts_only_fills_the_drafters_cache() -> None:
    batch = Batch(PARD, prompts=(3, 2), pasts=(), accepted=())
    outputs = batch.forward()
    (call,) = batch.draft_model.calls
    assert call["input_ids"] == [1, 2, 3, 4, 5]
    assert "gathered" not in call
    assert state(batch.attn)["kv"] == [3, 2]
    assert not outputs["next_draft_tokens"].any()


@pytest.mark.parametrize(("capturing", "end"), [(False, [16, 26]), (True, [19, 28])])
def test_kv_lens_come_back_while_a_graph_warms_up(
    capturing: bool, end: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(PARD, prompts=(), graph=True)
    original = batch.attn.kv_lens_cuda
    monkeypatch.setattr(CpuGraph, "recording", capturing)
    batch.forward()
    assert batch.draft_model.calls[0]["kv"] == [17, 27]
    assert state(batch.attn)["kv"] == end
    assert batch.attn.kv_lens_cuda is original
    assert not batch.worker._kv_rewind_pending


@pytest.mark.parametrize("graph", [False, True])
def test_the_increment_is_undone_or_completed_wherever_a_torch_call_fails(graph: bool) -> None:
    """Upstream has two windows that leave the lengths one too long: around the increment and before the rewind."""
    prompts = () if graph else (5,)

    def attempt(batch: Batch, fault: Fault | None) -> dict[str, int]:
        with Sites() as sites, sites.bracket(fault, [] if fault else [TORCH]) as bracket:
            batch.forward()
        return bracket.counts

    passages = attempt(Batch(PARD, prompts=prompts, graph=graph), None)
    seen = set()
    for site, count in passages.items():
        for occurrence in range(1, count + 1):
            batch = Batch(PARD, prompts=prompts, graph=graph)
            with pytest.raises(torch.OutOfMemoryError):
                attempt(batch, Fault(site=site, occurrence=occurrence, kind=FaultKind.OOM))
            seen.add(tuple(state(batch.attn)["kv"][len(prompts) :]))
            assert not batch.worker._kv_rewind_pending
    assert seen == ({(16, 26)} if graph else {(16, 26), (19, 28)})
