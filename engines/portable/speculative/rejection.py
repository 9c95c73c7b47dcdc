"""Rejection sampling: drafts are verified by what was proposed for them, which is kept by request until then.

A proposal is a row of probabilities upstream. Here it is one number, which stands for such a row
(``scenarios.tracer``), and logits carry what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.copies import copy_to_device
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.row_tracer import digests_of, proposal
from scenarios.tracer import NO_PROPOSAL


@dataclass(kw_only=True, eq=False)
class ProposalRows:
    """What metadata of speculation has for rejection sampling; a graph's shares all of it with the eager steps.

    use_rejection_sampling  whether there is any of the rest
    proposal_slots          which row each request has; None without
    draft_probs             int64 [slots + 1, Kmax], device: what was proposed for each draft; the last row is for
        dummies
    batch_slot_ids          int64 [max_num_requests], device: row of each request of the batch
    dummy_slot_row          the last row
    rejection_rows          int64 [1], device: generations that the last forward has verified by proposals
    """

    device: torch.device
    max_num_requests: int
    use_rejection_sampling: bool = field(default=False, init=False)
    proposal_slots: SeqSlotManager | None = field(default=None, init=False)
    dummy_slot_row: int = field(default=0, init=False)
    draft_probs: Tensor = field(init=False)
    batch_slot_ids: Tensor = field(init=False)
    rejection_rows: Tensor = field(init=False)

    def prepare_rejection_sampling_buffers(self, slots: SeqSlotManager, max_draft_len: int) -> None:
        """Verify by proposals from now on, kept in the rows that requests have by ``slots``."""
        self.use_rejection_sampling, self.proposal_slots = True, slots
        self.dummy_slot_row = slots.dummy_slot
        self.draft_probs = torch.zeros(slots.dummy_slot + 1, max_draft_len, dtype=torch.int64, device=self.device)
        self.batch_slot_ids = torch.zeros(self.max_num_requests, dtype=torch.int64, device=self.device)
        self.rejection_rows = torch.zeros(1, dtype=torch.int64, device=self.device)

    def _prepare_proposals(self, request_ids: Sequence[int]) -> None:
        assert self.proposal_slots is not None
        slots = self.proposal_slots.get_slots(request_ids)
        copy_to_device("batch_slot_ids", self.batch_slot_ids[: len(slots)], host_tensor(slots, self.device))
        self.rejection_rows.zero_()

    def write_padding_draft_probs(self, num_contexts: int, num_drafts: Sequence[int], draft_len: int) -> None:
        """Propose nothing for draft slots of the generations that are padding: all behind ``num_drafts`` of each.

        Upstream does it for generations that have no draft at all, and leaves older proposals where K has grown.
        """
        if not self.use_rejection_sampling or all(count >= draft_len for count in num_drafts):
            return
        slots = self.batch_slot_ids[num_contexts : num_contexts + len(num_drafts)]
        counts = torch.empty(len(num_drafts), dtype=torch.int32, device=self.device)
        copy_to_device("num_drafts", counts, host_tensor(num_drafts, self.device))
        is_padding = torch.arange(draft_len, device=self.device) >= counts.unsqueeze(1)
        rows = self.draft_probs[:, :draft_len]
        rows.index_copy_(0, slots, rows.index_select(0, slots).masked_fill(is_padding, NO_PROPOSAL))

    def write_context_draft_probs(self, num_contexts: int, draft_len: int) -> None:
        """Propose nothing for contexts, of workers that draft nothing for them."""
        if self.use_rejection_sampling and num_contexts:
            self.draft_probs[:, :draft_len].index_fill_(0, self.batch_slot_ids[:num_contexts], NO_PROPOSAL)


class RejectionSampling(torch.nn.Module):
    """The part of a worker that keeps proposals and verifies by them."""

    def _can_use_rejection_sampling(
        self, logits: Tensor, draft_tokens: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> bool:
        """Whether it is configured and there is something to verify, by the shapes of what is at hand."""
        num_gens, draft_len = draft_tokens.shape
        if not spec_metadata.use_rejection_sampling or not num_gens or not draft_len:
            return False
        enough_rows = len(logits) >= attn_metadata.num_contexts + num_gens * (draft_len + 1)
        probs, slots = spec_metadata.draft_probs, spec_metadata.batch_slot_ids
        return enough_rows and probs.shape[1] >= draft_len and len(slots) >= attn_metadata.num_seqs

    def _proposals_hold(self, logits: Tensor, draft_tokens: Tensor, attn_metadata: Any, spec_metadata: Any) -> Tensor:
        """Which drafts were proposed by a drafter that knew what the target knows: bool [G, K]. Those of dummies were.

        logits  [C + G * (K + 1), ...]
        """
        num_gens, draft_len = draft_tokens.shape
        num_contexts = attn_metadata.num_contexts
        known = digests_of(logits[num_contexts:]).view(num_gens, draft_len + 1)[:, :draft_len]
        slots = spec_metadata.batch_slot_ids[num_contexts : attn_metadata.num_seqs]
        draft_probs = spec_metadata.draft_probs.index_select(0, slots)[:, :draft_len]
        spec_metadata.rejection_rows.fill_(num_gens)
        depth = torch.arange(draft_len, device=logits.device)
        is_dummy = (slots == spec_metadata.dummy_slot_row).unsqueeze(1)
        return (draft_probs == proposal(depth, known)) | is_dummy

    def _scatter_draft_probs(self, logits: Tensor, spec_metadata: Any, draft_step: int | None) -> None:
        """Keep what is proposed at one depth for all rows, [n, ...], or at all depths for the generations, [G, K, ...].

        ``draft_step`` is None for the latter.
        """
        rows, slots = spec_metadata.draft_probs, spec_metadata.batch_slot_ids
        digests = digests_of(logits)
        if draft_step is not None:
            depth = torch.full_like(digests, draft_step)
            rows[:, draft_step].index_copy_(0, slots[: len(digests)], proposal(depth, digests))
            return
        num_gens, draft_len = digests.shape
        depth = torch.arange(draft_len, device=logits.device)
        end = len(spec_metadata.request_ids)
        rows[:, :draft_len].index_copy_(0, slots[end - num_gens : end], proposal(depth, digests))
