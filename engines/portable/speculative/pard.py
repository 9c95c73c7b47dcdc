"""PARD: one forward over mask tokens makes all drafts at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.portable.models import PARDDraftModel
from engines.portable.speculative.draft_kv_cache import draft_kv_cache_context
from engines.portable.speculative.drafter import Drafter
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.parallel import ParallelSpecWorker


class PARDSpecMetadata(SpecMetadata):
    """What PARD knows of the step; nothing beside the base's."""


class PARDWorker(ParallelSpecWorker):
    """Parallel drafter: a generation feeds its accepted tokens and then masks, 2K rows in all."""

    def _reshape_draft_tokens_for_accept(self, spec_metadata: SpecMetadata, num_gens: int) -> Tensor:
        assert spec_metadata.draft_tokens is not None
        draft_len = spec_metadata.runtime_draft_len
        return spec_metadata.draft_tokens.view(num_gens, 2 * draft_len - 1)[:, :draft_len]

    def _reshape_logits_for_accept(self, logits: Tensor, spec_metadata: SpecMetadata, num_contexts: int) -> Tensor:
        draft_len, vocab_size = spec_metadata.runtime_draft_len, logits.shape[-1]
        gens = logits[num_contexts:].view(-1, 2 * draft_len, vocab_size)[:, : draft_len + 1]
        return torch.cat([logits[:num_contexts], gens.reshape(-1, vocab_size)])

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
        accepted, num_accepted = self._accept_drafts(logits, attn_metadata, spec_metadata)
        accepted = torch.nn.functional.pad(accepted, (0, draft_len - 1))
        self._prepare_attn_metadata_for_pard(attn_metadata, spec_metadata)
        # Its rows are not the target's, so where they are stored is found once the metadata refers to their cache.
        with draft_kv_cache_context(attn_metadata):
            self._prepare_kv_for_draft_forward(attn_metadata, num_accepted)
            inputs = self.prepare_1st_drafter_inputs(
                input_ids, position_ids, accepted, num_accepted, attn_metadata, spec_metadata
            )
            hidden = draft_model.model(**inputs, attn_metadata=attn_metadata, spec_metadata=spec_metadata)
        drafts = torch.zeros(attn_metadata.num_seqs, 2 * draft_len - 1, dtype=torch.int32, device=logits.device)
        spec_metadata.write_context_draft_probs(num_contexts, draft_len)
        if attn_metadata.num_generations:
            rows = self._draft_rows(num_accepted, attn_metadata, spec_metadata)
            draft_logits = draft_model.logits_processor(
                hidden.index_select(0, rows), draft_model.lm_head, attn_metadata, True
            )
            block = draft_logits.view(-1, draft_len, draft_logits.shape[-1])
            drafts[num_contexts:, :draft_len] = self._override_drafts(self.sample_draft_tokens(block, spec_metadata))
        self._rollback_guided_decoder_after_verify(num_accepted)
        self._restore_attn_metadata_from_spec_dec(attn_metadata)
        self._apply_kv_rewind_after_draft(attn_metadata)
        return self._outputs(logits, accepted, num_accepted, drafts)

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


DRAFTERS = (
    Drafter(
        name="PARDWorker",
        mode=SpeculativeDecodingMode.PARD,
        worker=lambda setting: PARDWorker(setting.spec_config),
        spec_metadata=lambda setting, _: PARDSpecMetadata(**setting.sizes),
        draft_model=lambda setting: PARDDraftModel(setting.tracer, setting.steering, setting.head(parallel=True)),
    ),
)
