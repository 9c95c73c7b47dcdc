"""DFlash: one block of drafts per generation, from a context of the target's hidden states that the worker keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.portable._utils import host_tensor, is_current_stream_capturing, is_graph_warmup
from engines.portable.copies import copy_to_device
from engines.portable.models import DFlashDraftModel
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.speculative.capture import CapturingSpecMetadata
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Drafter, Setting
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.parallel import ParallelSpecWorker


@dataclass(kw_only=True, eq=False)
class DFlashSpecMetadata(CapturingSpecMetadata):
    """Captures hidden states as Eagle3 does, and knows where the context of each row is kept.

    seq_slot_manager  slots of the requests
    batch_to_slot     int64 [max_num_requests], device: slot of each row
    """

    seq_slot_manager: SeqSlotManager

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_to_slot = torch.zeros(self.max_num_requests, dtype=torch.int64, device=self.device)

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step."""
        super().prepare()
        assert self.request_ids is not None
        slots = self.seq_slot_manager.get_slots(self.request_ids)
        copy_to_device("batch_to_slot", self.batch_to_slot[: len(slots)], host_tensor(slots, self.device))

    def get_hidden_states(self, num_tokens: int) -> Tensor:
        """What was captured of the step's tokens: int64 [num_tokens, hidden_size * layers]."""
        return self.hidden_states[:num_tokens]


class DFlashWorker(ParallelSpecWorker):
    """Block drafter: a generation queries its context with its last accepted token and then masks.

    A context has a column per cached token, key and value of what the target made of it. The draft forward reads
    neither KV cache nor attention metadata.

    num_slots    requests that can have a context at a time; one slot more is for dummies
    max_seq_len  columns of a context at most

    _ctx_len                int64 [num_slots + 1], device: columns per slot; the next owner finds the last one's
    _ctx_k_buf, _ctx_v_buf  int64 [num_slots + 1, max_seq_len], device
    """

    def __init__(self, spec_config: DecodingConfig, *, num_slots: int, max_seq_len: int, device: torch.device) -> None:
        super().__init__(spec_config)
        self._dummy_slot = num_slots
        shape = num_slots + 1, max_seq_len
        # Here and not in the first forward, as upstream has it: that one may be the capture of a graph.
        self._ctx_len = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._ctx_k_buf = torch.zeros(shape, dtype=torch.int64, device=device)
        self._ctx_v_buf = torch.zeros(shape, dtype=torch.int64, device=device)
        self._saved_ctx_len = self._ctx_len
        self._ctx_len_restore_pending = False

    @property
    def _draft_block_width(self) -> int:
        """Rows of a block: the last accepted token and a mask per draft."""
        return self.max_draft_len + 1

    def _draft_slot_ids(self, draft_len: int, device: torch.device) -> Tensor:
        """Rows of a block that predict its drafts: int64 [K]."""
        return torch.arange(1, draft_len + 1, device=device)

    def _refine_block_logits(self, logits: Tensor, draft_model: Any, attn_metadata: Any) -> Tensor:
        """Correct the logits of the drafts, float32 [G, K, vocab size]."""
        return logits

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
        self._save_ctx_len()
        forward = self._forward_draft if spec_metadata.runtime_draft_len else self.skip_drafting
        outputs = forward(input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model)
        if is_graph_warmup(attn_metadata):
            self._restore_ctx_len()
        self._ctx_len_restore_pending = False
        return outputs

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

        The context grows all the same. Upstream leaves it as it is, and is short of a token from then on.
        """
        accepted, num_accepted = self._accept_own_tokens(logits, attn_metadata, spec_metadata)
        self._append_to_context(position_ids, num_accepted, attn_metadata, spec_metadata, draft_model)
        return self._outputs(logits, accepted, num_accepted, accepted[:, :0])

    def _forward_draft(
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
        self._prepare_attn_metadata_for_dflash(attn_metadata, spec_metadata)
        self._prepare_kv_for_draft_forward(attn_metadata, num_accepted)
        self._append_to_context(position_ids, num_accepted, attn_metadata, spec_metadata, draft_model)
        drafts = torch.zeros(attn_metadata.num_seqs, draft_len, dtype=torch.int32, device=logits.device)
        spec_metadata.write_context_draft_probs(num_contexts, draft_len)
        if attn_metadata.num_generations:
            inputs = self.prepare_1st_drafter_inputs(accepted, num_accepted, attn_metadata, spec_metadata)
            hidden = draft_model.dflash_forward(**inputs)
            draft_logits = draft_model.logits_processor(
                hidden.index_select(0, self._draft_rows(attn_metadata, spec_metadata)),
                draft_model.lm_head,
                attn_metadata,
                True,
            )
            block = draft_logits.view(-1, draft_len, draft_logits.shape[-1])
            block = self._refine_block_logits(block, draft_model, attn_metadata)
            drafts[num_contexts:] = self._override_drafts(self.sample_draft_tokens(block, spec_metadata))
        self._rollback_guided_decoder_after_verify(num_accepted)
        self._restore_attn_metadata_from_spec_dec(attn_metadata)
        self._apply_kv_rewind_after_draft(attn_metadata)
        return self._outputs(logits, accepted, num_accepted, drafts)

    def _append_to_context(
        self, position_ids: Tensor, num_accepted: Tensor, attn_metadata: Any, spec_metadata: Any, draft_model: Any
    ) -> None:
        """Append the step's tokens to the contexts of their requests: a whole chunk, or what was accepted.

        Rejected tokens are written as well, behind the new end, where the next step's will be. A request at its first
        position starts anew in a slot that was another's.
        """
        n, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        positions, lens = position_ids.squeeze(0), attn_metadata.seq_lens_cuda.long()
        slots = spec_metadata.batch_to_slot[:n]
        starts = lens.cumsum(0) - lens
        is_first = positions.index_select(0, starts) == 0
        begins = torch.where(is_first, 0, self._ctx_len.index_select(0, slots))
        # Told how many there will be, this does not wait for the device.
        rows = torch.repeat_interleave(lens, output_size=len(positions))
        columns = torch.arange(len(positions), device=lens.device) + (begins - starts).index_select(0, rows)
        projected = draft_model.project_target_hidden(spec_metadata.get_hidden_states(len(positions)))
        keys, values = draft_model.precompute_context_kv(projected, positions)
        place = slots.index_select(0, rows), columns.clamp_(max=self._ctx_k_buf.shape[1] - 1)
        self._ctx_k_buf.index_put_(place, keys)
        self._ctx_v_buf.index_put_(place, values)
        added = torch.cat([lens[:num_contexts], num_accepted[num_contexts:]])
        # The context of dummies stays empty, so that what they draft does not depend on earlier ones.
        self._ctx_len.index_copy_(0, slots, begins + added * (slots < self._dummy_slot))

    def prepare_1st_drafter_inputs(
        self, accepted_tokens: Tensor, num_accepted: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> dict[str, Tensor]:
        """Inputs of the draft forward: per generation a block of queries behind its context, and where that is."""
        n, num_contexts, width = attn_metadata.num_seqs, attn_metadata.num_contexts, self._draft_block_width
        # No on_update: the counters stay those of the target's layout.
        attn_metadata._seq_lens[num_contexts:n].fill_(self.max_draft_len + 1)
        attn_metadata._seq_lens_cuda[num_contexts:n].fill_(self.max_draft_len + 1)
        slots = spec_metadata.batch_to_slot[num_contexts:n]
        ctx_len = self._ctx_len.index_select(0, slots)
        masks = accepted_tokens.new_full((len(slots), width - 1), self.spec_config.mask_token_id)
        return {
            "noise_embedding": self._prepare_next_new_tokens(
                accepted_tokens[num_contexts:], num_accepted[num_contexts:], masks
            ),
            "query_positions": ctx_len.unsqueeze(1) + torch.arange(width, device=ctx_len.device),
            "num_ctx_per_req": ctx_len,
            "ctx_k_cache": self._ctx_k_buf,
            "ctx_v_cache": self._ctx_v_buf,
            "ctx_cache_batch_idx": slots,
        }

    def _draft_rows(self, attn_metadata: Any, spec_metadata: Any) -> Tensor:
        """Rows of the draft forward that predict drafts: K per generation."""
        starts = spec_metadata.batch_indices_cuda[: attn_metadata.num_generations] * self._draft_block_width
        ids = self._draft_slot_ids(spec_metadata.runtime_draft_len, starts.device)
        return (starts.unsqueeze(1) + ids).flatten()

    def _prepare_attn_metadata_for_dflash(self, attn_metadata: Any, spec_metadata: Any) -> None:
        """Save what drafting changes; while a graph warms up the KV lengths too, which its forwards share."""
        self._prepare_attn_metadata_for_spec_dec(attn_metadata)

    def _save_ctx_len(self) -> None:
        """Remember the lengths until this forward has succeeded; those of a capture are only recorded."""
        if not is_current_stream_capturing():
            self._saved_ctx_len, self._ctx_len_restore_pending = self._ctx_len.clone(), True

    def _restore_ctx_len(self) -> None:
        _, self._ctx_len_restore_pending = self._ctx_len.copy_(self._saved_ctx_len), False

    def _ensure_spec_dec_state_restored(self, attn_metadata: Any, spec_metadata: SpecMetadata | None) -> None:
        try:
            super()._ensure_spec_dec_state_restored(attn_metadata, spec_metadata)
        finally:
            # Lengths that a failed forward has advanced are ahead of what is committed from then on (PR #16382).
            if self._ctx_len_restore_pending:
                self._restore_ctx_len()


def in_slots(worker: type[DFlashWorker], setting: Setting) -> DFlashWorker:
    """A worker with room for the contexts of all requests that may run."""
    return worker(
        setting.spec_config, num_slots=setting.num_slots, max_seq_len=setting.max_seq_len, device=setting.device
    )


def slotted_metadata(setting: Setting, manager: SeqSlotManager) -> DFlashSpecMetadata:
    """Metadata that knows the slot of each row."""
    return DFlashSpecMetadata(**setting.sizes, **setting.capture, seq_slot_manager=manager)


DRAFTERS = (
    Drafter(
        name="DFlashWorker",
        mode=SpeculativeDecodingMode.DFLASH,
        worker=lambda setting: in_slots(DFlashWorker, setting),
        spec_metadata=slotted_metadata,
        draft_model=lambda setting: DFlashDraftModel(setting.tracer, setting.steering, setting.head(parallel=True)),
        resource_manager=lambda setting: SeqSlotManager(setting.num_slots),
    ),
)
