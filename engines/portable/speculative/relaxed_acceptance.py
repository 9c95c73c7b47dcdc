"""Relaxed acceptance: a request that thinks accepts drafts that are among the target's first choices, if not the first.

Which phase a request is in is kept by slot: how far below the first choice the probability of an accepted draft may
be, 0 outside of thinking. It begins with a prompt that has a certain token, and here it lasts as long as the request.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.interface import SpecWorkerBase


class RelaxedDeltaManager(SpecResourceManager):
    """Keeps a delta per slot where acceptance is relaxed; a slot that nobody holds has none.

    relaxed_delta_pool  float32 [num_slots], device; None where acceptance is strict (upstream's vanilla MTP:
        ``mtp_relaxed_delta_pool``)
    """

    def __init__(self, num_slots: int, *, relaxed: bool, device: torch.device) -> None:
        super().__init__(num_slots)
        self.relaxed_delta_pool = torch.zeros(num_slots, dtype=torch.float32, device=device) if relaxed else None

    def free_resources(self, request: LlmRequest) -> None:
        """Take the slot back, without its delta; does nothing for a request that has none."""
        slot = self.slot_manager.get_slot(request.py_request_id)
        if self.relaxed_delta_pool is not None and slot is not None:
            self.relaxed_delta_pool[slot] = 0
        super().free_resources(request)

    def _add_slot(self, request: LlmRequest) -> int:
        slot = super()._add_slot(request)
        if self.relaxed_delta_pool is not None:
            self.relaxed_delta_pool[slot] = 0
        return slot


class RelaxedAcceptanceWorker(SpecWorkerBase):
    """A worker that accepts in a relaxed way where it is configured so; its metadata has ``slot_ids``."""

    spec_config: DecodingConfig

    @abstractmethod
    def _relaxed_delta_pool(self, spec_metadata: Any) -> Tensor:
        """The deltas that the metadata's resource manager keeps."""

    def _update_relaxed_delta(self, input_ids: Tensor, attn_metadata: Any, spec_metadata: Any) -> None:
        """Let the requests think whose chunk of the prompt begins it, and no other context.

        Done in a step without drafts as well; upstream's does not notice there that a request begins to think.
        """
        if not self.spec_config.use_relaxed_acceptance_for_thinking:
            return
        num_contexts = attn_metadata.num_contexts
        begins = input_ids[: attn_metadata.num_ctx_tokens] == self.spec_config.begin_thinking_phase_token
        seen = torch.nn.functional.pad(begins.cumsum(0), (1, 0))
        lens = attn_metadata.seq_lens_cuda[:num_contexts].long()
        ends = lens.cumsum(0)
        deltas = ((seen[ends] - seen[ends - lens]) > 0) * self.spec_config.relaxed_delta
        slots = spec_metadata.slot_ids[:num_contexts]
        self._relaxed_delta_pool(spec_metadata).index_copy_(0, slots, deltas.float())

    def sample_and_accept_draft_tokens(
        self, logits: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """As the base; or, where configured, with each draft that is among the target's ``relaxed_topk`` choices.

        Its probability may be below the first one's by the request's delta. What is accepted are the drafts
        themselves, then the target's choice; the entries behind are 1.
        """
        if not self.spec_config.use_relaxed_acceptance_for_thinking:
            return super().sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        drafts = self._reshape_draft_tokens_for_accept(spec_metadata, batch_size - num_contexts)
        num_gens, draft_len = drafts.shape
        accepted_tokens = torch.ones(batch_size, draft_len + 1, dtype=torch.int32, device=logits.device)
        num_accepted_tokens = torch.ones(batch_size, dtype=torch.int32, device=logits.device)
        accepted_tokens[:num_contexts, 0] = self._sample_tokens_for_batch(logits[:num_contexts])
        candidates = self.spec_config.relaxed_topk
        topk = torch.softmax(logits[num_contexts:], dim=-1).topk(candidates)
        values, tokens = (each.view(num_gens, draft_len + 1, candidates) for each in topk)
        deltas = self._relaxed_delta_pool(spec_metadata)[spec_metadata.slot_ids[num_contexts:batch_size]]
        is_close = values >= values[:, :, :1] - deltas.view(-1, 1, 1)
        taken = (is_close[:, :-1] & (tokens[:, :-1] == drafts.unsqueeze(2))).any(2)
        num_drafts = taken.cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32).unsqueeze(1)
        column = torch.arange(draft_len + 1, device=logits.device)
        padded = torch.nn.functional.pad(drafts, (0, 1))
        gens = accepted_tokens[num_contexts:]
        gens.copy_(torch.where(column < num_drafts, padded, torch.where(column == num_drafts, tokens[:, :, 0], gens)))
        num_accepted_tokens[num_contexts:] += num_drafts.squeeze(1)
        self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts, draft_len, spec_metadata)
        return accepted_tokens, num_accepted_tokens
