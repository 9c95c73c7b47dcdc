"""Drafters that read the target's KV cache through a view of its metadata, and have none of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.page_tracer import ViewTracer
from engines.portable.attention.backends.flashinfer import FlashInferAttention, FlashInferAttentionMetadata
from engines.portable.attention.backends.trtllm import TARGET_LAYER
from engines.portable.distributed import FusedMoE
from engines.portable.heads import Steering
from engines.portable.models import DraftModel
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Setting
from engines.portable.speculative.interface import INVALID_PROMPT_LOOKAHEAD_TOKEN
from engines.portable.speculative.linear import LinearSpecWorker


class SharedKVDraftModel(DraftModel):
    """One row per sequence in every step, which reads what the target has cached and writes nothing."""

    def __init__(self, tracer: ViewTracer, steering: Steering, head: nn.Module, experts: FusedMoE | None) -> None:
        super().__init__(steering)
        self.attention = FlashInferAttention(tracer, TARGET_LAYER)
        # No layers of its own to call; but workers look for d2t there.
        self.model = nn.Module()
        self.model.register_buffer("d2t", steering.d2t)
        self.logits_processor = head
        self.experts = experts

    def forward_draft_step(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        recurrent_hidden_states: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
    ) -> tuple[Tensor, Tensor]:
        """Logits of the next draft of each sequence, and what its next step is given: int64 [n, 2].

        recurrent_hidden_states  int64 [n, 2]: the target's hidden rows at first
        """
        choices, passed_on = self.attention.shared(attn_metadata, position_ids, input_ids, recurrent_hidden_states)
        if self.experts is not None:
            passed_on = self.experts(passed_on, attn_metadata.all_rank_num_tokens)
        hidden = torch.stack([passed_on[:, 0], choices], dim=1)
        logits: Tensor = self.logits_processor(hidden, self.lm_head, attn_metadata, True)
        return logits, passed_on


def shared_kv_draft_model(setting: Setting) -> SharedKVDraftModel:
    """The draft model of a mode whose drafter has no KV cache."""
    assert isinstance(setting.tracer, ViewTracer), "only FlashInfer has views of the target's KV cache"
    experts = setting.draft_experts if setting.spec_config.spec_dec_mode.is_mtp_eagle_one_model() else None
    return SharedKVDraftModel(setting.tracer, setting.steering, setting.head(), experts)


class SharedKVSpecWorker(LinearSpecWorker):
    """The linear loop, or without a KV cache of the drafter's the one that recurs over hidden states alone."""

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__(spec_config)
        self._use_shared_kv_cache = spec_config.use_shared_kv_cache

    def _forward_impl(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        logits: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
    ) -> dict[str, Tensor]:
        if not self._use_shared_kv_cache or spec_metadata.runtime_draft_len == 0:
            return super()._forward_impl(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model
            )
        if not isinstance(attn_metadata, FlashInferAttentionMetadata):
            raise TypeError(f"a drafter reads the KV cache through FlashInfer's views; {type(attn_metadata)} has none")
        accepted, num_accepted = self._accept_drafts(logits, attn_metadata, spec_metadata)
        drafts = self._forward_external_shared_target_kv_draft_loop(
            position_ids=position_ids,
            hidden_states=hidden_states,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            draft_model=draft_model,
            accepted_tokens=accepted,
            num_accepted_tokens=num_accepted,
            num_contexts=attn_metadata.num_contexts,
            batch_size=attn_metadata.num_seqs,
        )
        attn_metadata.use_spec_decoding = True
        return self._outputs(logits, accepted, num_accepted, drafts)

    def skip_drafting(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        logits: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
    ) -> dict[str, Tensor]:
        """A step without drafts, see the base; a drafter without a cache misses nothing in it."""
        if not self._use_shared_kv_cache:
            return super().skip_drafting(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model
            )
        accepted, num_accepted = self._accept_own_tokens(logits, attn_metadata, spec_metadata)
        return self._outputs(logits, accepted, num_accepted, accepted[:, :0])

    def _prepare_shared_kv_draft_inputs(
        self,
        *,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        num_contexts: int,
        batch_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Last token int32 [n], hidden row int64 [n, 2] and position [1, n] with which the loop begins.

        The token is the one after what a row has cached: the last accepted one, or of a prompt the next.
        """
        last = accepted_tokens.gather(1, (num_accepted_tokens - 1).long().unsqueeze(1)).squeeze(1)
        lookahead = spec_metadata.context_prompt_lookahead_tokens[:num_contexts]
        known = lookahead != INVALID_PROMPT_LOOKAHEAD_TOKEN
        tokens = torch.cat([torch.where(known, lookahead, last[:num_contexts]), last[num_contexts:batch_size]])
        gather_ids = self._first_gather_ids(num_accepted_tokens, attn_metadata, spec_metadata)
        positions = position_ids.squeeze(0).index_select(0, gather_ids) + 1
        return tokens, hidden_states.index_select(0, gather_ids), positions.unsqueeze(0)

    def _forward_external_shared_target_kv_draft_loop(
        self,
        *,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        num_contexts: int,
        batch_size: int,
    ) -> Tensor:
        """Make ``runtime_draft_len`` drafts: int32 [n, K]. Positions and KV lengths are the same in all steps.

        The view that the backend gives for it is set up here and left to its next preparation.
        """
        tokens, recurrent, positions = self._prepare_shared_kv_draft_inputs(
            position_ids=position_ids,
            hidden_states=hidden_states,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            accepted_tokens=accepted_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_contexts=num_contexts,
            batch_size=batch_size,
        )
        view = attn_metadata.get_shared_kv_draft_metadata(num_accepted_tokens, num_contexts)
        view.use_spec_decoding = False
        view.padded_num_tokens = None
        view.all_rank_num_tokens = spec_metadata.subseq_all_rank_num_tokens
        drafts = []
        for i in range(spec_metadata.runtime_draft_len):
            logits, recurrent = draft_model.forward_draft_step(
                input_ids=tokens,
                position_ids=positions.squeeze(0),
                recurrent_hidden_states=recurrent,
                attn_metadata=view,
                spec_metadata=spec_metadata,
            )
            tokens = self.sample_draft_tokens(logits, spec_metadata, draft_step=i)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)
