"""Recurrent states and proposals on tensors: sums over rows, slots that nobody else writes, and who is believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.rejection import RejectionSampling
from engines.row_tracer import (
    chain_states,
    context_states,
    digests_of,
    mixed,
    proposal,
    steps_of,
    tree_states,
    with_digests,
)
from engines.tracer import one_hot
from scenarios.tracer import NO_PROPOSAL, PRIME, VOCAB_SIZE, recurrent_state
from tests.engines.portable.support import CPU, ints

DIGESTS = [0, 1, 65_535, 65_536, PRIME - 1]


def _long(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_logits_carry_what_they_were_chosen_from() -> None:
    logits = with_digests(one_hot(_long([3, 1022, 5, 7, 9])), _long(DIGESTS))
    assert digests_of(logits).tolist() == DIGESTS
    assert logits.argmax(1).tolist() == [3, 1022, 5, 7, 9]
    masked = logits.clone()
    masked[:, : VOCAB_SIZE - 1] = -torch.inf
    assert (masked.argmax(1) < VOCAB_SIZE).all()


def test_states_go_on_from_the_row_before() -> None:
    positions, tokens = [4, 5, 0, 1, 2], [9, 8, 7, 6, 5]
    steps = steps_of(ints(positions), ints(tokens))
    expected = []
    for begin, end, state in ((0, 2, 111), (2, 5, PRIME - 1)):
        for position, token in zip(positions[begin:end], tokens[begin:end]):
            state = recurrent_state(state, position, token)
            expected.append(state)
    assert context_states(steps, ints([2, 3]), _long([111, PRIME - 1])).tolist() == expected
    chain = chain_states(steps[2:].view(1, 3), _long([PRIME - 1]))
    assert chain.tolist() == [expected[2:]]
    # The same rows as a root with two children.
    siblings = tree_states(steps[2:].view(1, 3), _long([PRIME - 1]), ints([[[0b001], [0b011], [0b101], [0b1]]]))
    assert siblings[0, :2].tolist() == expected[2:4]
    assert siblings[0, 2] == recurrent_state(expected[2], 2, 5)


def test_a_right_state_changes_nothing_and_dummies_have_none() -> None:
    digests, states = _long([5, 5, 5]), _long([5, 6, 6])
    assert mixed(digests, states, torch.tensor([False, False, True])).tolist() == [5, 4, 5]


@pytest.fixture
def hybrid() -> MambaHybridCacheManager:
    return MambaHybridCacheManager(
        max_batch_size=4, tokens_per_gen_step=3, num_layers=2, num_blocks=8, tokens_per_block=4, max_seq_len=32,
        max_total_draft_tokens=2, num_extra_kv_tokens=1, device=CPU,
    )  # fmt: skip


def test_accepted_states_become_live_and_others_stay(hybrid: MambaHybridCacheManager) -> None:
    requests = tuple(LlmRequest(i, [1, 2, 3]) for i in range(3))
    hybrid.prepare_resources(ScheduledRequests(requests))
    slots = hybrid.get_state_indices([2, 1, 77])
    assert slots[2] == hybrid.padding_slot
    hybrid.intermediate_ssm_states.copy_(_long(range(1, 13)).view(4, 3))
    attn = SimpleNamespace(num_contexts=1, num_seqs=3)
    hybrid.update_mamba_states(
        attn_metadata=attn, num_accepted_tokens=ints([1, 3, 2]), state_indices=ints([*slots, slots[0]])
    )
    # Row 0 is a context; the last row is a dummy's.
    states = hybrid.ssm_states[hybrid.get_state_indices([0, 1, 2])]
    assert states.tolist() == [0, 3, 0]
    assert not hybrid.ssm_states[hybrid.padding_slot]
    hybrid.update_mamba_states(
        attn_metadata=attn,
        num_accepted_tokens=ints([1, 3, 2]),
        state_indices=ints(slots),
        accepted_leaf_positions=ints([1, 0]),
    )
    assert hybrid.ssm_states[slots[1]] == 2
    hybrid.free_resources(requests[1])
    assert hybrid.mamba_slots.slot_manager.get_slot(1) is None


def _metadata(requests: tuple[LlmRequest, ...]) -> SpecMetadata:
    """Metadata of a context, two generations and a dummy, K = 2."""
    slots = SeqSlotManager(6)
    slots.prepare_resources(ScheduledRequests(requests))
    spec = SpecMetadata(
        max_num_requests=4, max_num_tokens=32, spec_dec_mode=SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
        max_total_draft_tokens=2, device=CPU,
    )  # fmt: skip
    spec.prepare_rejection_sampling_buffers(slots, 3)
    spec.request_ids, spec.num_generations = [3, 1, 2, 99], 3
    spec.prepare()
    return spec


def test_only_drafts_with_their_own_proposals_are_accepted() -> None:
    spec = _metadata(tuple(LlmRequest(i, [1]) for i in range(1, 5)))
    worker = RejectionSampling()
    known = _long([[11, 12], [21, 22], [31, 32]])
    logits = with_digests(torch.zeros(6, VOCAB_SIZE), known.flatten()).view(3, 2, -1)
    worker._scatter_draft_probs(logits, spec, None)
    drafts, attn = torch.zeros(3, 2), SimpleNamespace(num_contexts=1, num_seqs=4)
    target = with_digests(torch.zeros(10, VOCAB_SIZE), _long([0, 11, 12, 0, 22, 21, 0, 1, 2, 0]))
    assert worker._can_use_rejection_sampling(target, drafts, attn, spec)
    assert not worker._can_use_rejection_sampling(target[:9], drafts, attn, spec)
    held = worker._proposals_hold(target, drafts, attn, spec)
    # What was proposed one after the other is not believed the other way round; a dummy's drafts nobody proposed.
    assert held.tolist() == [[True, True], [False, False], [True, True]]
    assert spec.rejection_rows.tolist() == [3]
    spec.prepare()
    assert spec.rejection_rows.tolist() == [0]


def test_padding_and_contexts_propose_nothing() -> None:
    spec = _metadata(tuple(LlmRequest(i, [1]) for i in range(1, 5)))
    spec.draft_probs.fill_(7)
    spec.write_padding_draft_probs(1, [2, 1, 0], 2)
    spec.write_context_draft_probs(1, 2)
    nothing = NO_PROPOSAL
    rows = spec.draft_probs[spec.batch_slot_ids[:3]]
    assert rows.tolist() == [[nothing, nothing, 7], [7, 7, 7], [7, nothing, 7]]
    assert spec.draft_probs.eq(nothing).sum() == 5, "other rows stay, but for that of dummies"


def test_one_draft_step_proposes_for_all_rows() -> None:
    spec = _metadata(tuple(LlmRequest(i, [1]) for i in range(1, 5)))
    RejectionSampling()._scatter_draft_probs(with_digests(torch.zeros(4, VOCAB_SIZE), _long([5, 6, 7, 8])), spec, 1)
    rows = spec.draft_probs[spec.batch_slot_ids]
    assert rows[:, 1].tolist() == proposal(_long([1, 1, 1, 1]), _long([5, 6, 7, 8])).tolist()
    assert not rows[:, (0, 2)].any()
