"""The linear draft loop: one draft token per forward of the drafter, as Eagle3, MTP-Eagle and DraftTarget do it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from engines.kernels import triton_for
from engines.portable.attention.backends import ragged
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.draft_kv_cache import draft_kv_cache_context
from engines.portable.speculative.interface import SpecMetadata, SpecWorkerBase

DraftInputs = dict[str, Tensor]


class LinearSpecWorker(SpecWorkerBase):
    """Drafts token by token: the first forward ingests the step's tokens, each later one its predecessor's draft.

    Upstream writes this loop once per worker; here the workers differ in what they feed and how they call their
    draft model.
    """

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__()
        self.spec_config = spec_config

    @property
    def max_draft_len(self) -> int:
        """Drafts per request at most."""
        return self.spec_config.max_draft_len

    def _save_attn_metadata(self, attn_metadata: Any, spec_metadata: Any) -> None:
        """Save what the draft loop changes."""
        self._prepare_attn_metadata_for_spec_dec(attn_metadata)

    @abstractmethod
    def _drafter_hidden_states(self, draft_model: Any, hidden_states: Tensor, spec_metadata: Any) -> Tensor | None:
        """Hidden states that the first draft forward is fed, of the target's rows; None for none."""

    @abstractmethod
    def _forward_draft_model(
        self, draft_model: Any, inputs: DraftInputs, attn_metadata: Any, spec_metadata: Any, draft_step: int
    ) -> tuple[Tensor, Tensor]:
        """One forward of the draft model: rows for the head, and hidden states for the next forward."""

    @abstractmethod
    def _draft_logits(self, draft_model: Any, hidden_states: Tensor, attn_metadata: Any) -> Tensor:
        """Logits of the draft head, one row per sequence."""

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
        if spec_metadata.runtime_draft_len == 0:
            return self.skip_drafting(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model
            )
        accepted, num_accepted = self._accept_drafts(logits, attn_metadata, spec_metadata)
        self._save_attn_metadata(attn_metadata, spec_metadata)
        inputs = self.prepare_1st_drafter_inputs(
            input_ids, position_ids, hidden_states, accepted, attn_metadata, spec_metadata, draft_model
        )
        with draft_kv_cache_context(attn_metadata) as drafting:
            drafts = self._forward_draft_loop(draft_model, inputs, num_accepted, drafting, spec_metadata)
        self._restore_attn_metadata_from_spec_dec(attn_metadata)
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
        """A step without drafts: each row's own token, and none to come; the attention metadata is not touched.

        The drafter is fed all the same: a step that it misses would leave a hole in its cache (PR #16888).
        """
        accepted, num_accepted = self._accept_own_tokens(logits, attn_metadata, spec_metadata)
        inputs = self.prepare_1st_drafter_inputs(
            input_ids, position_ids, hidden_states, accepted, attn_metadata, spec_metadata, draft_model
        )
        with draft_kv_cache_context(attn_metadata) as drafting:
            self._forward_draft_model(draft_model, inputs, drafting, spec_metadata, 0)
        return self._outputs(logits, accepted, num_accepted, accepted[:, :0])

    def prepare_1st_drafter_inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        accepted_tokens: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
    ) -> DraftInputs:
        """Inputs of the first draft forward, in the target's layout: at each position the token after it.

        Contexts shifted by one; of each generation the target's tokens of all of its rows, accepted or not.
        """
        context_ids = self._prepare_context_input_ids(input_ids, attn_metadata, spec_metadata, accepted_tokens)
        gen_ids = self._fed_tokens(accepted_tokens[attn_metadata.num_contexts :], attn_metadata, spec_metadata)
        inputs = {"input_ids": torch.cat([context_ids, gen_ids]), "position_ids": position_ids.squeeze(0)}
        hidden = self._drafter_hidden_states(draft_model, hidden_states, spec_metadata)
        if hidden is not None:
            inputs["hidden_states"] = hidden
        return inputs

    def _fed_tokens(self, tokens: Tensor, attn_metadata: Any, spec_metadata: SpecMetadata) -> Tensor:
        """Tokens of the generations' rows, one after the other, of the target's, int32 [G, K + 1]."""
        widths = spec_metadata.verify_widths
        if widths is None or not len(widths):
            return tokens.flatten()
        return ragged.flat(tokens, widths, attn_metadata.num_tokens - attn_metadata.num_ctx_tokens)

    def _forward_draft_loop(
        self, draft_model: Any, inputs: DraftInputs, num_accepted: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> Tensor:
        """Make ``runtime_draft_len`` drafts: int32 [n, K]."""
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        gather_ids = self._first_gather_ids(num_accepted, attn_metadata, spec_metadata)
        next_draft_tokens = []
        for i in range(spec_metadata.runtime_draft_len):
            if self.guided_decoder is not None:
                # Only handed over, so it does not matter that upstream's Eagle3 does it behind the forward.
                new_tokens = inputs["input_ids"].index_select(0, gather_ids)
                self.guided_decoder.add_draft_batch(new_tokens, num_accepted, draft_step=i)
            hidden, hidden_to_save = self._forward_draft_model(draft_model, inputs, attn_metadata, spec_metadata, i)
            logits = self._draft_logits(draft_model, hidden.index_select(0, gather_ids), attn_metadata)
            if self.guided_decoder is not None:
                self.guided_decoder.execute_draft_batch(logits, self._d2t, draft_step=i)
            tokens = self.sample_draft_tokens(logits, spec_metadata, draft_step=i)
            next_draft_tokens.append(tokens)
            positions = inputs["position_ids"].index_select(0, gather_ids) + 1
            keep_hidden = "hidden_states" in inputs
            inputs = {"input_ids": tokens, "position_ids": positions}
            if keep_hidden:
                inputs["hidden_states"] = hidden_to_save.index_select(0, gather_ids)
            if i == 0:
                widths = spec_metadata.verify_widths
                verified = spec_metadata.runtime_draft_len if widths is None else widths - 1
                self._collapse_to_one_row(attn_metadata, num_accepted, num_contexts, verified)
            else:
                attn_metadata.kv_lens_cuda[:batch_size].add_(1)
            attn_metadata.update_for_spec_dec()
            attn_metadata.use_spec_decoding = False
            gather_ids = spec_metadata.batch_indices_cuda[:batch_size]
        drafts = torch.stack(next_draft_tokens, dim=1)
        return torch.cat([drafts[:num_contexts], self._override_drafts(drafts[num_contexts:])])

    def _first_gather_ids(self, num_accepted: Tensor, attn_metadata: Any, spec_metadata: SpecMetadata) -> Tensor:
        """The row of each sequence that the next draft follows: the last, or that of the last accepted token."""
        num_contexts, num_gens = attn_metadata.num_contexts, attn_metadata.num_generations
        assert spec_metadata.gather_ids is not None
        starts = (
            spec_metadata.batch_indices_cuda[:num_gens] * (spec_metadata.runtime_draft_len + 1)
            if spec_metadata.verify_widths is None
            else ragged.first_rows(spec_metadata.verify_widths).int()
        )
        gens = starts + (num_accepted[num_contexts:] + (attn_metadata.num_ctx_tokens - 1))
        return torch.cat([spec_metadata.gather_ids[:num_contexts], gens])

    def _collapse_to_one_row(
        self, attn_metadata: Any, num_accepted: Tensor, num_contexts: int, draft_len: int | Tensor
    ) -> None:
        """Turn the batch into one generation row per sequence, each right after its last accepted token."""
        batch_size = attn_metadata.num_seqs
        attn_metadata._seq_lens[:batch_size].fill_(1)
        attn_metadata._seq_lens_cuda[:batch_size].fill_(1)
        attn_metadata.on_update()
        if hasattr(attn_metadata, "host_request_types"):
            attn_metadata.host_request_types[:num_contexts].fill_(1)
        attn_metadata.num_contexts = 0
        follow_accepted(attn_metadata.kv_lens_cuda[:batch_size], num_accepted, num_contexts, draft_len)


def follow_accepted(kv_lens: Tensor, num_accepted: Tensor, num_contexts: int, draft_len: int | Tensor) -> None:
    """Move KV lengths, int32 [n], to the one row that each sequence feeds next: what was not accepted is forgotten.

    ``draft_len`` is how many drafts the generations have verified, or of each of them, int32 [G].
    """
    if isinstance(draft_len, int) and (kernels := triton_for(kv_lens)):
        kernels.follow_accepted(kv_lens, num_accepted, num_contexts, draft_len)
        return
    kv_lens[num_contexts:].add_(num_accepted[num_contexts:] - draft_len)
    kv_lens[:num_contexts].add_(1)
