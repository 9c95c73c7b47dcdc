"""Vanilla MTP: inputs of its layers, the lengths that they share, and the history of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.portable.graphs import CpuGraph
from engines.portable.models import HIDDEN_SIZE
from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.mtp import MTPHiddenStatesManager, MTPSpecMetadata
from scenarios import Step
from scenarios.tracer import PRIME, entry, prompt_token, term
from tests import worked_examples as examples
from tests.engines.portable.scripts import context, generations, go, greedy, scenario, updated
from tests.engines.portable.support import CPU, Batch, state


class Layers:
    """MTP layers that note what they are called with; row ``r`` of layer ``i`` has the hidden state ``1000 i + r``."""

    def __init__(self, count: int) -> None:
        self.calls: list[dict[str, Any]] = []
        self.lm_head = self.embed_tokens = None
        self.mtp_layers = [Layer(self, i) for i in range(count)]


class Layer:
    def __init__(self, owner: Layers, number: int) -> None:
        self.owner, self.number = owner, number

    def __call__(self, *, embed_tokens: Any, attn_metadata: Any, **inputs: Tensor) -> Tensor:
        noted = {k: (v[:, 0] if k == "hidden_states" else v).tolist() for k, v in inputs.items()}
        self.owner.calls.append(state(attn_metadata) | noted)
        rows = 1000 * self.number + torch.arange(len(noted["input_ids"]))
        return rows.unsqueeze(1).expand(-1, HIDDEN_SIZE)

    def shared_head(self, hidden_states: Tensor, lm_head: Any, attn_metadata: Any) -> Tensor:
        drafts = 90 + 10 * self.number + torch.arange(attn_metadata.num_seqs)
        return torch.nn.functional.one_hot(drafts, 200)


def spec_metadata(manager: MTPHiddenStatesManager, draft_len: int) -> MTPSpecMetadata:
    return MTPSpecMetadata(
        max_num_requests=4,
        max_num_tokens=64,
        spec_dec_mode=SpeculativeDecodingMode.MTP,
        max_total_draft_tokens=draft_len,
        device=CPU,
        mtp_hidden_states_manager=manager,
    )


def prepared(monkeypatch: pytest.MonkeyPatch, draft_len: int = 3, **options: Any) -> Batch:
    """A batch of the vanilla worker whose generations have the history 61, 62, ... and 71, 72, ..."""
    manager = MTPHiddenStatesManager(draft_len, HIDDEN_SIZE, 8, CPU)
    metadata = spec_metadata(manager, draft_len)
    monkeypatch.setattr("tests.engines.portable.support.get_spec_metadata", lambda *_: metadata)
    for request_id in (99, 11, 0, 1, 12, 10):
        manager._add_slot(LlmRequest(request_id, [1]))
    for request_id, first in ((10, 61), (11, 71)):
        (slot,) = manager.slot_manager.get_slots([request_id])
        manager.mtp_past_tokens_pool[slot] = torch.arange(first, first + draft_len)
        hidden = torch.arange(10 * first, 10 * (first + draft_len), 10)
        manager.mtp_past_hidden_states_pool[slot] = hidden.unsqueeze(1)
    batch = Batch("MTPWorker", draft_len=draft_len, **options)
    batch.arguments["draft_model"] = Layers(draft_len)
    return batch


def history(batch: Batch, request_ids: Sequence[int]) -> list[list[int]]:
    manager = batch.spec.mtp_hidden_states_manager
    return manager.mtp_past_tokens_pool[manager.slot_manager.get_slots(request_ids)].tolist()  # type: ignore[no-any-return]


def test_worked_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of 5, generations with 10 and 20 cached that accept 3 and 2 tokens, K = 3."""
    batch = prepared(monkeypatch)
    before = state(batch.attn)
    outputs = batch.forward()
    calls = batch.arguments["draft_model"].calls
    assert before["kv"] == [5, 14, 24]
    for call in calls:
        assert {name: call[name] for name in before} == before | {
            "seq_lens": [5, 3, 3], "seq_lens_cuda": [5, 3, 3], "kv": [5, 13, 22], "counters": (1, 5, 2, 11),
        }  # fmt: skip
        assert call["position_ids"] == [*range(5), 10, 11, 12, 19, 20, 21]
    # The generations fed 6..9 and 10..13, of which 6, 7, 8 and 10, 11 are cached.
    assert history(batch, [0, 10, 11]) == [[3, 4, 5], [6, 7, 8], [73, 10, 11]]
    assert [call["input_ids"] for call in calls] == [
        [2, 3, 4, 5, 40, 7, 8, 43, 10, 11, 46],
        [3, 4, 5, 40, 90, 8, 43, 91, 11, 46, 92],
        [4, 5, 40, 90, 100, 43, 91, 101, 46, 92, 102],
    ]
    assert [call["hidden_states"] for call in calls] == [
        [0, 1, 2, 3, 4, 5, 6, 7, 730, 9, 10],
        [1, 2, 3, 4, 4, 6, 7, 7, 9, 10, 10],
        [2, 3, 4, 4, 1004, 7, 7, 1007, 10, 10, 1010],
    ]
    assert state(batch.attn) == before | {"kv": [5, 13, 22]}
    assert outputs["new_tokens_lens"].tolist() == [1, 3, 2]
    assert outputs["next_draft_tokens"].tolist() == [[90, 100, 110], [91, 101, 111], [92, 102, 112]]
    assert outputs["next_new_tokens"][:, 0].tolist() == [40, 43, 46]


@pytest.mark.parametrize(
    ("layout", "draft_len", "kv0", "kv", "positions"),
    [
        (((), (10, 20, 7), (3, 2, 1)), 3, [14, 24, 11], [13, 22, 8], [*range(10, 13), *range(19, 22), *range(5, 8)]),
        (((5,), (10, 20), (2, 1)), 1, [5, 12, 22], [5, 12, 21], [*range(5), 11, 20]),
        (((5,), (10, 20), (5, 2)), 4, [5, 15, 25], [5, 15, 22], [*range(5), *range(11, 15), *range(18, 22)]),
        (((3, 2), (), ()), 3, [3, 2], [3, 2], [0, 1, 2, 0, 1]),
    ],
)
def test_other_layouts(
    layout: Any, draft_len: int, kv0: list[int], kv: list[int], positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths and positions that upstream's worker was seen to feed."""
    prompts, pasts, accepted = layout
    batch = prepared(monkeypatch, draft_len, prompts=prompts, pasts=pasts, accepted=accepted)
    assert state(batch.attn)["kv"] == kv0
    batch.forward()
    calls = batch.arguments["draft_model"].calls
    assert [call["kv"] for call in calls] == [kv] * draft_len
    assert [call["position_ids"] for call in calls] == [positions] * draft_len
    assert state(batch.attn)["kv"] == kv


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_saves_no_more_and_moves_the_lengths_each_time(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = prepared(monkeypatch, prompts=(), graph=True)
    lengths = batch.attn.kv_lens_cuda
    monkeypatch.setattr(CpuGraph, "recording", capturing)
    batch.forward()
    assert state(batch.attn)["kv"] == [13, 22]
    batch.forward()
    assert state(batch.attn)["kv"] == [12, 20]
    assert batch.attn.kv_lens_cuda is lengths


def test_what_is_kept_between_steps() -> None:
    """Cached tokens and their digests; layer ``i`` holds, at each position, the token ``i + 1`` after its own."""
    k = 3
    steps = [Step(draft_len=k, contexts=(context("MTPWorker", 0, 4, 1),))]
    steps += [Step(draft_len=k, generations=generations([0], agree)) for agree in (k, 0, 2)]
    trace = go(scenario("MTPWorker", (4,), *steps))
    emitted = updated(trace, "emitted")[0]
    tokens = [*(prompt_token(0, 0, i) for i in range(4)), *emitted]
    assert emitted == greedy(0, 0, 4, len(emitted))
    digests, digest = [], 0
    for n, token in enumerate(tokens[:-1]):
        digest = (digest + term(n, entry(n, token))) % PRIME
        digests.append(digest)
    assert updated(trace, "mtp_past_tokens")[0] == tokens[-1 - k : -1]
    assert updated(trace, "mtp_past_hidden_states")[0] == digests[-k:]
    past = len(tokens) - 1
    for i, layer in enumerate(updated(trace, "draft_layers_kv")[0]):
        known = [entry(n, tokens[n + 1 + i]) for n in range(past - i)]
        # All drafts accepted in one step: the next one's rows begin after the slot of its first token.
        assert [(slot, full) for slot, full in zip(layer, known) if slot != full] == [(0, known[6])]


def test_a_request_without_a_slot_is_not_run() -> None:
    manager = MTPHiddenStatesManager(2, HIDDEN_SIZE, 4, CPU)
    metadata = spec_metadata(manager, 2)
    metadata.request_ids = [5]
    with pytest.raises(KeyError):
        metadata.prepare()


@pytest.mark.parametrize("case", examples.MTP[-2:])
def test_rows_that_reach_back_before_the_first_position(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    prompts, past, accepted, k, _, kv0, after, seq_lens, positions = case
    batch = prepared(monkeypatch, k, prompts=prompts, pasts=past, accepted=accepted)
    assert state(batch.attn)["kv"] == kv0
    batch.forward()
    for call in batch.arguments["draft_model"].calls:
        assert (call["kv"], call["seq_lens"], call["position_ids"]) == (after, seq_lens, positions)
    assert state(batch.attn)["kv"] == after


def test_a_second_forward_on_one_preparation_goes_on_where_the_first_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = prepared(monkeypatch, examples.DRAFT_LEN)
    batch.forward()
    batch.forward()
    assert state(batch.attn)["kv"] == examples.MTP_WITHOUT_PREPARING
