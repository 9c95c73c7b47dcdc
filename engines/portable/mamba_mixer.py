"""Recurrent layers of the target, on the tracer model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
            of_rows = self._verified(attn_metadata, steps[num_ctx_tokens:].view(n - num_contexts, -1), initial)
            manager.intermediate_ssm_states[: n - num_contexts, : of_rows.shape[1]].copy_(of_rows)
            states.append(of_rows.flatten())
        is_dummy = (slots == manager.padding_slot).repeat_interleave(lens.long(), output_size=len(steps))
        return mixed(digests, torch.cat(states), is_dummy)

    def _verified(self, attn_metadata: Any, steps: Tensor, initial: Tensor) -> Tensor:
        """States after each row of the generations, int64 [G, w]; nodes of trees go on from their parents."""
        initial = initial[attn_metadata.num_contexts :]
        if not getattr(attn_metadata, "is_spec_dec_dynamic_tree", False):
            return chain_states(steps, initial)
        return tree_states(steps, initial, attn_metadata.spec_decoding_packed_mask)
