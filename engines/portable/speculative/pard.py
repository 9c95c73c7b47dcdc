"""PARD: one forward over mask tokens makes all drafts at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.portable._utils import is_graph_warmup
from engines.portable.speculative.interface import DecodingConfig, SpecMetadata, SpecWorkerBase


class PARDSpecMetadata(SpecMetadata):
    """What PARD knows of the step; nothing beside the base's."""


class PARDWorker(SpecWorkerBase):
    """Parallel drafter: a generation feeds its accepted tokens and then masks, 2K rows in all.

    ``kv_lens_cuda`` grows by 1 per generation for that forward, as its rows start one position after the
    target's, and is then moved to where the next step's length will be: ``acc`` beyond the entry's.
    """

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__()
        self.spec_config = spec_config
        self._kv_rewind_amount: Tensor | None = None
        self._kv_rewind_nc = 0
        self._kv_rewind_bs = 0
        self._kv_rewind_pending = False

    @property
    def max_draft_len(self) -> int:
        """Drafts per request at most."""
        return self.spec_config.max_draft_len

    def _reshape_draft_tokens_for_accept(self, spec_metadata: SpecMetadata, num_gens: int) -> Tensor:
        assert spec_metadata.draft_tokens is not None
        draft_len = spec_metadata.runtime_draft_len
        return spec_metadata.draft_tokens.view(num_gens, 2 * draft_len - 1)[:, :draft_len]

    def _reshape_logits_for_accept(self, logits: Tensor, spec_metadata: SpecMetadata, num_contexts: int) -> Tensor:
        draft_len, vocab_size = spec_metadata.runtime_draft_len, logits.shape[-1]
        gens = logits[num_contexts:].view(-1, 2 * draft_len, vocab_size)[:, : draft_len + 1]
        return torch.cat([logits[:num_contexts], gens.reshape(-1, vocab_size)])

    def _fields_to_save(self, attn_metadata: Any) -> tuple[str, ...]:
        fields = super()._fields_to_save(attn_metadata)
        return (*fields, "kv_lens_cuda") if is_graph_warmup(attn_metadata) else fields

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
        draft_len, num_contexts = spec_metadata.runtime_draft_len, attn_metadata.num_contexts
        accepted, num_accepted = self.sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)
        accepted = torch.nn.functional.pad(accepted, (0, draft_len - 1))
        self._prepare_attn_metadata_for_pard(attn_metadata, spec_metadata)
        self._prepare_kv_for_draft_forward(attn_metadata, num_accepted)
        inputs = self.prepare_1st_drafter_inputs(
            input_ids, position_ids, accepted, num_accepted, attn_metadata, spec_metadata
        )
        hidden = draft_model.model(**inputs, attn_metadata=attn_metadata, spec_metadata=spec_metadata)
        drafts = torch.zeros(attn_metadata.num_seqs, 2 * draft_len - 1, dtype=torch.int32, device=logits.device)
        if attn_metadata.num_generations:
            rows = self._draft_rows(num_accepted, attn_metadata, spec_metadata)
            draft_logits = draft_model.logits_processor(
                hidden.index_select(0, rows), draft_model.lm_head, attn_metadata, True
            )
            block = draft_logits.view(-1, draft_len, draft_logits.shape[-1])
            drafts[num_contexts:, :draft_len] = self.sample_draft_tokens(block, spec_metadata)
        self._restore_attn_metadata_from_spec_dec(attn_metadata)
        self._apply_kv_rewind_after_draft(attn_metadata)
        return self._outputs(logits, accepted, num_accepted, drafts)

    def _prepare_kv_for_draft_forward(self, attn_metadata: Any, num_accepted: Tensor) -> None:
        """Move the generations one token on for the draft forward; the rewind is due from then on."""
        self._kv_rewind_nc, self._kv_rewind_bs = attn_metadata.num_contexts, attn_metadata.num_seqs
        self._kv_rewind_amount = 1 - num_accepted[self._kv_rewind_nc :]
        gens = attn_metadata.kv_lens_cuda[self._kv_rewind_nc : self._kv_rewind_bs]
        # One operation and the flag right with it. Upstream's ``+=`` on a slice has a second one, the assignment
        # back, whose failure leaves the lengths moved and no rewind due.
        _, self._kv_rewind_pending = gens.add_(1), True
        attn_metadata.update_for_spec_dec()

    def _apply_kv_rewind_after_draft(self, attn_metadata: Any) -> None:
        """Take ``1 - acc`` off again, once; while a graph warms up the original lengths are back already."""
        if is_graph_warmup(attn_metadata):
            self._kv_rewind_pending = False
            return
        gens = attn_metadata.kv_lens_cuda[self._kv_rewind_nc : self._kv_rewind_bs]
        # Upstream clears the flag first, and a subtraction that fails is then never made up for.
        _, self._kv_rewind_pending = gens.sub_(self._kv_rewind_amount), False

    def _ensure_spec_dec_state_restored(self, attn_metadata: Any, spec_metadata: SpecMetadata | None) -> None:
        super()._ensure_spec_dec_state_restored(attn_metadata, spec_metadata)
        if self._kv_rewind_pending:
            self._apply_kv_rewind_after_draft(attn_metadata)

    def prepare_1st_drafter_inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        accepted_tokens: Tensor,
        num_accepted: Tensor,
        attn_metadata: Any,
        spec_metadata: SpecMetadata,
    ) -> dict[str, Tensor]:
        """Inputs of the draft forward: contexts as they are; per generation accepted tokens, then masks.

        Positions of a generation run up to its KV length, which is one ahead of the target's.
        """
        num_contexts, num_ctx_tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        width = 2 * spec_metadata.runtime_draft_len
        column = torch.arange(width, dtype=torch.int32, device=input_ids.device)
        given = column < num_accepted[num_contexts:].unsqueeze(1)
        gen_ids = torch.where(given, accepted_tokens[num_contexts:], self.spec_config.mask_token_id)
        kv_lens = attn_metadata.kv_lens_cuda[num_contexts : attn_metadata.num_seqs]
        gen_positions = kv_lens.unsqueeze(1) - width + column
        return {
            "input_ids": torch.cat([input_ids[:num_ctx_tokens], gen_ids.flatten()]),
            "position_ids": torch.cat([position_ids[0, :num_ctx_tokens], gen_positions.flatten()]),
        }

    def _prepare_attn_metadata_for_pard(self, attn_metadata: Any, spec_metadata: SpecMetadata) -> None:
        """Save what drafting changes; while a graph warms up the KV lengths too, which its forwards share."""
        self._prepare_attn_metadata_for_spec_dec(attn_metadata)

    def _draft_rows(self, num_accepted: Tensor, attn_metadata: Any, spec_metadata: SpecMetadata) -> Tensor:
        """Rows of the draft forward that predict: K per generation, from the last accepted token on."""
        num_contexts, num_gens = attn_metadata.num_contexts, attn_metadata.num_generations
        draft_len = spec_metadata.runtime_draft_len
        starts = spec_metadata.batch_indices_cuda[:num_gens] * (2 * draft_len) + num_accepted[num_contexts:]
        depth = torch.arange(draft_len, dtype=torch.int32, device=starts.device)
        return (starts.unsqueeze(1) + (depth + (attn_metadata.num_ctx_tokens - 1))).flatten()
