"""MTP layers as drafters: MTP-Eagle runs one of them again and again, vanilla MTP runs K, each looking further on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.copies import copy_to_device
from engines.portable.models import HIDDEN_SIZE, MTPDraftModel, MTPEagleDraftModel
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.draft_kv_cache import draft_kv_cache_context
from engines.portable.speculative.drafter import Drafter, Setting
from engines.portable.speculative.eagle3 import (
    Eagle3OneModelSpecMetadata,
    Eagle3ResourceManager,
    MTPEagleWorker,
    eagle3_resource_manager,
)
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.relaxed_acceptance import RelaxedAcceptanceWorker, RelaxedDeltaManager


class MTPHiddenStatesManager(RelaxedDeltaManager):
    """The last ``max_draft_len`` cached tokens of each request with the target's hidden states of them, by slot.

    What a slot's last owner left is overwritten by the prompt, which is long enough for that.

    mtp_past_tokens_pool         int32 [slots, Kmax], device, oldest first
    mtp_past_hidden_states_pool  int64 [slots, Kmax, hidden_size], device
    """

    def __init__(
        self, max_draft_len: int, hidden_size: int, num_slots: int, device: torch.device, *, relaxed: bool = False
    ) -> None:
        super().__init__(num_slots, relaxed=relaxed, device=device)
        shape = num_slots, max_draft_len
        self.mtp_past_tokens_pool = torch.zeros(shape, dtype=torch.int32, device=device)
        self.mtp_past_hidden_states_pool = torch.zeros(*shape, hidden_size, dtype=torch.int64, device=device)


@dataclass(kw_only=True, eq=False)
class MTPSpecMetadata(SpecMetadata):
    """Adds where the history of each row is: ``slot_ids``, int64 [max_num_requests], device."""

    mtp_hidden_states_manager: MTPHiddenStatesManager

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slot_ids = torch.zeros(self.max_num_requests, dtype=torch.int64, device=self.device)

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step."""
        super().prepare()
        assert self.request_ids is not None
        self.num_tokens = self.dp_num_tokens(self.num_tokens, self.num_generations)
        slots = self.mtp_hidden_states_manager.slot_manager.get_slots(self.request_ids)
        copy_to_device("slot_ids", self.slot_ids[: len(slots)], host_tensor(slots, self.device))

    def dp_num_tokens(self, num_tokens: int, num_generations: int) -> int:
        """Of a rank's tokens those that it tells the other ranks of attention data parallelism: what a layer is fed.

        That is one row per generation less than the target is.
        """
        return num_tokens - num_generations


class MTPWorker(RelaxedAcceptanceWorker):
    """Vanilla MTP: layer ``i`` drafts the token ``i + 1`` after the accepted ones, from tokens shifted by ``i + 1``.

    A generation feeds each layer its last K positions again, as what was drafted beyond the accepted tokens may
    have been wrong; their tokens and hidden states come from the history that is kept by slot. Drafting leaves
    ``kv_lens_cuda`` of the generations where the accepted tokens end, and never below K, as upstream has it. Upstream
    also keeps a host list of cached tokens in step, which nothing here reads.
    """

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__()
        self.spec_config = spec_config

    @property
    def max_draft_len(self) -> int:
        """Drafts per request at most."""
        return self.spec_config.max_draft_len

    def _relaxed_delta_pool(self, spec_metadata: MTPSpecMetadata) -> Tensor:
        pool = spec_metadata.mtp_hidden_states_manager.relaxed_delta_pool
        assert pool is not None
        return pool

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
        self._update_relaxed_delta(input_ids, attn_metadata, spec_metadata)
        accepted, num_accepted = self._accept_drafts(logits, attn_metadata, spec_metadata)
        self.update_mtp_hidden_states(input_ids, hidden_states, num_accepted, attn_metadata, spec_metadata)
        inputs = self.prepare_drafter_inputs(
            input_ids, position_ids, hidden_states, accepted, num_accepted, attn_metadata, spec_metadata
        )
        self.change_attn_metadata(num_accepted, attn_metadata, spec_metadata)
        with draft_kv_cache_context(attn_metadata):
            drafts = self._forward_layers(inputs, num_accepted, attn_metadata, spec_metadata, draft_model)
        num_contexts = attn_metadata.num_contexts
        drafts = torch.cat([drafts[:num_contexts], self._override_drafts(drafts[num_contexts:])])
        self._restore_attn_metadata_from_spec_dec(attn_metadata)
        return self._outputs(logits, accepted, num_accepted, drafts)

    def _forward_layers(
        self,
        inputs: dict[str, Tensor],
        num_accepted: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
    ) -> Tensor:
        """One forward of each layer: drafts, int32 [n, K]."""
        last_tokens = torch.cumsum(attn_metadata.seq_lens_cuda, dim=0) - 1
        next_draft_tokens = []
        for i, layer in enumerate(draft_model.mtp_layers):
            if self.guided_decoder is not None:
                new_tokens = inputs["input_ids"].index_select(0, last_tokens)
                self.guided_decoder.add_draft_batch(new_tokens, num_accepted, draft_step=i)
            hidden = layer(embed_tokens=draft_model.embed_tokens, **inputs, attn_metadata=attn_metadata)
            draft_logits = layer.shared_head(hidden, draft_model.lm_head, attn_metadata)
            if self.guided_decoder is not None:
                self.guided_decoder.execute_draft_batch(draft_logits, draft_step=i)
            tokens = self.sample_draft_tokens(draft_logits, spec_metadata, draft_step=i)
            next_draft_tokens.append(tokens)
            inputs = self._shift_inputs(inputs, last_tokens, tokens, hidden.index_select(0, last_tokens))
        return torch.stack(next_draft_tokens, dim=1)

    def _placeholder_draft_len(self, spec_metadata: SpecMetadata) -> int:
        return spec_metadata.runtime_draft_len

    def update_mtp_hidden_states(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        num_accepted_tokens: Tensor,
        attn_metadata: Any,
        spec_metadata: MTPSpecMetadata,
    ) -> None:
        """Append to the history what the step cached: of a context its chunk, of a generation what is accepted."""
        num_contexts = attn_metadata.num_contexts
        manager, slots = spec_metadata.mtp_hidden_states_manager, spec_metadata.slot_ids[: attn_metadata.num_seqs]
        seq_lens = attn_metadata.seq_lens_cuda
        cached = torch.cat([seq_lens[:num_contexts], num_accepted_tokens[num_contexts:]])
        size = self.max_draft_len
        # Entry ``j`` is number ``cached + j`` of the old entries followed by the rows of the sequence.
        number = cached.unsqueeze(1) + torch.arange(size, device=cached.device)
        is_old = number < size
        old = number.clamp(max=size - 1)
        first_rows = torch.cumsum(seq_lens, dim=0) - seq_lens
        rows = (first_rows.unsqueeze(1) + number - size).clamp(min=0)
        past_tokens = manager.mtp_past_tokens_pool.index_select(0, slots).gather(1, old)
        past_hidden = manager.mtp_past_hidden_states_pool.index_select(0, slots)
        past_hidden = past_hidden.gather(1, old.unsqueeze(2).expand_as(past_hidden))
        tokens = torch.where(is_old, past_tokens, input_ids[rows])
        hidden = torch.where(is_old.unsqueeze(2), past_hidden, hidden_states[rows])
        manager.mtp_past_tokens_pool.index_copy_(0, slots, tokens)
        manager.mtp_past_hidden_states_pool.index_copy_(0, slots, hidden)

    def prepare_drafter_inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        attn_metadata: Any,
        spec_metadata: MTPSpecMetadata,
    ) -> dict[str, Tensor]:
        """Inputs of the first layer, with the history already up to date: at each position the token after it.

        Contexts shifted by one; of each generation its last K cached positions.
        """
        num_contexts, num_ctx_tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        draft_len, num_gens = spec_metadata.runtime_draft_len, attn_metadata.num_generations
        manager = spec_metadata.mtp_hidden_states_manager
        slots = spec_metadata.slot_ids[num_contexts : attn_metadata.num_seqs]
        num_accepted = num_accepted_tokens[num_contexts:]
        last = accepted_tokens[num_contexts:].gather(1, (num_accepted - 1).long().unsqueeze(1))
        gen_ids = torch.cat([manager.mtp_past_tokens_pool.index_select(0, slots)[:, 1:], last], dim=1)
        gen_hidden = manager.mtp_past_hidden_states_pool.index_select(0, slots)
        target_positions = position_ids[0, num_ctx_tokens:].view(num_gens, draft_len + 1)[:, 1:]
        gen_positions = target_positions - (draft_len + 1 - num_accepted).unsqueeze(1)
        context_ids = self._prepare_context_input_ids(input_ids, attn_metadata, spec_metadata, accepted_tokens)
        return {
            "input_ids": torch.cat([context_ids, gen_ids.flatten()]),
            "position_ids": torch.cat([position_ids[0, :num_ctx_tokens], gen_positions.flatten()]),
            "hidden_states": torch.cat([hidden_states[:num_ctx_tokens], gen_hidden.flatten(0, 1)]),
        }

    def change_attn_metadata(
        self, num_accepted_tokens: Tensor, attn_metadata: Any, spec_metadata: SpecMetadata
    ) -> None:
        """Turn each generation into its last K cached positions, up to its last accepted token; all layers share it."""
        num_contexts, batch_size = attn_metadata.num_contexts, attn_metadata.num_seqs
        self._prepare_attn_metadata_for_spec_dec(attn_metadata)
        attn_metadata._seq_lens[num_contexts:batch_size].sub_(1)
        attn_metadata._seq_lens_cuda[num_contexts:batch_size].sub_(1)
        attn_metadata.on_update()
        rejected = spec_metadata.runtime_draft_len + 1 - num_accepted_tokens[num_contexts:]
        # A generation feeds K positions, also one that has fewer tokens; prompts here are long enough.
        kv_lens = attn_metadata.kv_lens_cuda[num_contexts:batch_size]
        kv_lens.sub_(rejected).clamp_(min=spec_metadata.runtime_draft_len)
        attn_metadata.on_update_kv_lens()

    def _shift_inputs(
        self, inputs: dict[str, Tensor], last_tokens: Tensor, tokens: Tensor, hidden_states: Tensor
    ) -> dict[str, Tensor]:
        """Inputs of the next layer: tokens and hidden states one position further on, the draft and its own last."""
        return {
            "input_ids": inputs["input_ids"].roll(-1).index_copy_(0, last_tokens, tokens),
            "position_ids": inputs["position_ids"],
            "hidden_states": inputs["hidden_states"].roll(-1, 0).index_copy_(0, last_tokens, hidden_states),
        }


def mtp_eagle_resource_manager(setting: Setting) -> Eagle3ResourceManager | None:
    """What MTP-Eagle keeps per request: nothing but how it accepts."""
    return eagle3_resource_manager(setting, 0) if setting.spec_config.use_relaxed_acceptance_for_thinking else None


DRAFTERS = (
    Drafter(
        name="MTPEagleWorker",
        mode=SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
        worker=lambda setting: MTPEagleWorker(setting.spec_config),
        spec_metadata=lambda setting, manager: Eagle3OneModelSpecMetadata(
            **setting.sizes, hidden_size=HIDDEN_SIZE, spec_resource_manager=manager
        ),
        draft_model=lambda setting: MTPEagleDraftModel(
            setting.tracer, setting.steering, setting.head(), setting.draft_experts
        ),
        resource_manager=mtp_eagle_resource_manager,
    ),
    Drafter(
        name="MTPWorker",
        mode=SpeculativeDecodingMode.MTP,
        worker=lambda setting: MTPWorker(setting.spec_config),
        spec_metadata=lambda setting, manager: MTPSpecMetadata(**setting.sizes, mtp_hidden_states_manager=manager),
        draft_model=lambda setting: MTPDraftModel(setting.tracer, setting.steering, setting.spec_config.max_draft_len),
        resource_manager=lambda setting: MTPHiddenStatesManager(
            setting.spec_config.max_draft_len,
            HIDDEN_SIZE,
            setting.num_slots,
            setting.device,
            relaxed=setting.spec_config.use_relaxed_acceptance_for_thinking,
        ),
    ),
)
