"""Eagle3: drafts from the hidden states of three layers of the target; also the base of MTP-Eagle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.copies import copy_to_device
from engines.portable.models import HIDDEN_SIZE, NUM_LAYERS, Eagle3DraftModel
from engines.portable.speculative.capture import CapturingSpecMetadata
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Drafter, Setting
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.linear import DraftInputs
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.relaxed_acceptance import RelaxedAcceptanceWorker, RelaxedDeltaManager
from engines.portable.speculative.shared_kv import SharedKVSpecWorker


class Eagle3ResourceManager(RelaxedDeltaManager):
    """Slots of the requests, and buffers of the metadata that the metadata of all graphs share.

    It has one slot more than the largest of ``num_slots``, ``max_num_requests`` and ``max_seq_len``, as upstream's.

    hidden_states       int64 [rows, hidden_size * layers], device: a row per token, and for each request as many
        more as a generation feeds
    batch_indices_cuda  int32 [max_num_requests], device
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_capture_layers: int,
        max_num_requests: int,
        max_seq_len: int,
        max_num_tokens: int,
        max_total_draft_tokens: int,
        num_slots: int,
        relaxed: bool,
        device: torch.device,
    ) -> None:
        super().__init__(max(num_slots, max_num_requests, max_seq_len) + 1, relaxed=relaxed, device=device)
        rows = min(max_num_tokens, max_num_requests * max_seq_len) + (max_total_draft_tokens + 1) * max_num_requests
        width = hidden_size * num_capture_layers
        self.hidden_states = torch.empty(rows, width, dtype=torch.int64, device=device)
        self.batch_indices_cuda = torch.empty(max_num_requests, dtype=torch.int32, device=device)


@dataclass(kw_only=True, eq=False)
class Eagle3OneModelSpecMetadata(CapturingSpecMetadata):
    """What Eagle3 and MTP-Eagle know of the step; MTP-Eagle captures nothing.

    spec_resource_manager  owner of the buffers that graphs share, or of the trees of drafts; None for neither
    slot_ids               int64 [max_num_requests], device: slot of each row, where that manager has slots of them
    """

    spec_resource_manager: Any = None

    def __post_init__(self) -> None:
        if self.layers_to_capture is None and self.spec_dec_mode.is_mtp_eagle_one_model():
            self.layers_to_capture = ()
        super().__post_init__()
        self.slot_ids = torch.zeros(self.max_num_requests, dtype=torch.int64, device=self.device)
        if isinstance(self.spec_resource_manager, Eagle3ResourceManager):
            manager = self.spec_resource_manager
            assert manager.hidden_states.shape[1] == self.hidden_states.shape[1], "the manager captures other layers"
            assert len(manager.batch_indices_cuda) >= self.max_num_requests, "the manager has too few batch indices"
            self.hidden_states, self.batch_indices_cuda = manager.hidden_states, manager.batch_indices_cuda

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step."""
        super().prepare()
        self.num_tokens = self.dp_num_tokens(self.num_tokens, self.num_generations)
        if isinstance(self.spec_resource_manager, Eagle3ResourceManager):
            assert self.request_ids is not None
            slots = self.spec_resource_manager.slot_manager.get_slots(self.request_ids)
            copy_to_device("slot_ids", self.slot_ids[: len(slots)], host_tensor(slots, self.device))

    def dp_num_tokens(self, num_tokens: int, num_generations: int) -> int:
        """Tokens that the ranks of attention data parallelism count: Eagle3 leaves the drafts out, at most Kmax each.

        With fewer drafts than Kmax it counts too few, and so upstream.
        """
        if self.spec_dec_mode.is_mtp_eagle_one_model():
            return num_tokens
        return num_tokens - num_generations * self.max_total_draft_tokens


class Eagle3OneModelWorker(RelaxedAcceptanceWorker, SharedKVSpecWorker):
    """Eagle3, and MTP-Eagle when the configured mode says so."""

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__(spec_config)
        self.is_mtp_eagle = spec_config.spec_dec_mode.is_mtp_eagle_one_model()

    def _relaxed_delta_pool(self, spec_metadata: Eagle3OneModelSpecMetadata) -> Tensor:
        pool: Tensor = spec_metadata.spec_resource_manager.relaxed_delta_pool
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
        return super()._forward_impl(
            input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model
        )

    def _drafter_hidden_states(
        self, draft_model: Any, hidden_states: Tensor, spec_metadata: Eagle3OneModelSpecMetadata
    ) -> Tensor:
        if self.is_mtp_eagle:
            return hidden_states
        captured: Tensor = draft_model.apply_eagle3_fc(spec_metadata.hidden_states[: hidden_states.shape[0]])
        return captured

    def _forward_draft_model(
        self, draft_model: Any, inputs: DraftInputs, attn_metadata: Any, spec_metadata: SpecMetadata, draft_step: int
    ) -> tuple[Tensor, Tensor]:
        # From the second forward on there is one token per sequence.
        counts = spec_metadata.subseq_all_rank_num_tokens if draft_step else spec_metadata.all_rank_num_tokens
        common = {"attn_metadata": attn_metadata, "spec_metadata": spec_metadata, "all_rank_num_tokens": counts}
        if self.is_mtp_eagle:
            hidden = draft_model.mtp_layers[0](embed_tokens=draft_model.embed_tokens, **inputs, **common)
            return hidden, hidden
        hidden, hidden_to_save = draft_model.model(**inputs, **common)
        return hidden, hidden_to_save

    def _draft_logits(self, draft_model: Any, hidden_states: Tensor, attn_metadata: Any) -> Tensor:
        head = draft_model.mtp_layers[0].shared_head if self.is_mtp_eagle else draft_model.logits_processor
        logits: Tensor = head(hidden_states, draft_model.lm_head, attn_metadata, True)
        return logits


class MTPEagleWorker(Eagle3OneModelWorker):
    """The worker of mode MTP_EAGLE_ONE_MODEL; its loop is the base's, which the mode steers.

    PR #12353 merged the two; ``mtp``, where the class was before, still has its name.
    """


def eagle3_resource_manager(setting: Setting, num_capture_layers: int) -> Eagle3ResourceManager:
    """The manager for metadata that captures ``num_capture_layers`` layers."""
    return Eagle3ResourceManager(
        hidden_size=HIDDEN_SIZE,
        num_capture_layers=num_capture_layers,
        max_num_requests=setting.max_num_requests,
        max_seq_len=setting.max_seq_len,
        max_num_tokens=setting.max_num_tokens,
        max_total_draft_tokens=setting.spec_config.max_total_draft_tokens,
        num_slots=setting.num_slots,
        relaxed=setting.spec_config.use_relaxed_acceptance_for_thinking,
        device=setting.device,
    )


DRAFTERS = (
    Drafter(
        name="Eagle3OneModelWorker",
        mode=SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
        worker=lambda setting: Eagle3OneModelWorker(setting.spec_config),
        spec_metadata=lambda setting, manager: Eagle3OneModelSpecMetadata(
            **setting.sizes, **setting.capture, spec_resource_manager=manager
        ),
        draft_model=lambda setting: Eagle3DraftModel(setting.tracer, setting.steering, setting.head()),
        resource_manager=lambda setting: eagle3_resource_manager(setting, NUM_LAYERS),
    ),
)
