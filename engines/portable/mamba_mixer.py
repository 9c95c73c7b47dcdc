"""Recurrent layers of the target, on the tracer model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.portable.attention.backends import ragged
from engines.row_tracer import chain_states, context_states, mixed, steps_of, tree_states
from scenarios.tracer import RECURRENT_START


class MambaMixer(nn.Module):
    """The recurrent layers of a hybrid model, of which each row goes on from the one before it.

    Contexts go on from their live states and write them; what generations write becomes live once it is accepted.
    """

    def forward(self, attn_metadata: Any, positions: Tensor, tokens: Tensor, digests: Tensor) -> Tensor:
        """Hidden states of the target's rows, int64 [rows], from the digests of its attention."""
        manager, mamba, n = attn_metadata.kv_cache_manager, attn_metadata.mamba_metadata, attn_metadata.num_seqs
        num_contexts, num_ctx_tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        slots, lens = mamba.state_indices[:n].long(), attn_metadata.seq_lens_cuda
        initial = torch.where(mamba.has_initial_states[:n], manager.ssm_states.index_select(0, slots), RECURRENT_START)
        steps = steps_of(positions, tokens)
        states = []
        if num_contexts:
            of_contexts = context_states(steps[:num_ctx_tokens], lens[:num_contexts], initial[:num_contexts])
            last_rows = lens[:num_contexts].cumsum(0) - 1
            manager.write_states(slots[:num_contexts], of_contexts.index_select(0, last_rows))
            states.append(of_contexts)
        if n > num_contexts:
            states.append(self._verified(attn_metadata, steps[num_ctx_tokens:], initial[num_contexts:]))
        is_dummy = (slots == manager.padding_slot).repeat_interleave(lens.long(), output_size=len(steps))
        return mixed(digests, torch.cat(states), is_dummy)

    def _verified(self, attn_metadata: Any, steps: Tensor, initial: Tensor) -> Tensor:
        """States after each row of the generations, int64 [rows], which are kept; nodes of trees follow parents."""
        kept: Tensor = attn_metadata.kv_cache_manager.intermediate_ssm_states[: len(initial)]
        widths = getattr(attn_metadata, "verify_widths", None)
        if widths is not None:
            states = context_states(steps, widths, initial)
            kept.copy_(ragged.padded(states, widths, kept.shape[1]))
            return states
        by_row = steps.view(len(initial), -1)
        states = (
            tree_states(by_row, initial, attn_metadata.spec_decoding_packed_mask)
            if getattr(attn_metadata, "is_spec_dec_dynamic_tree", False)
            else chain_states(by_row, initial)
        )
        kept[:, : states.shape[1]].copy_(states)
        return states.flatten()
