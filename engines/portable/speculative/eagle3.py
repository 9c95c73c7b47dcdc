"""Eagle3: drafts from the hidden states of three layers of the target; also the base of MTP-Eagle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.portable.models import Eagle3DraftModel
from engines.portable.speculative.drafter import Drafter
from engines.portable.speculative.interface import DecodingConfig, SpecMetadata
from engines.portable.speculative.linear import DraftInputs, LinearSpecWorker
from engines.portable.speculative.mode import SpeculativeDecodingMode


@dataclass(kw_only=True, eq=False)
class Eagle3OneModelSpecMetadata(SpecMetadata):
    """Adds the captured hidden states: int64 [max_num_tokens, hidden_size * layers], device, a column group per layer.

    layers_to_capture      layer ids, in order; empty for MTP-Eagle
    spec_resource_manager  keeps the trees of drafts; None where they are chains
    """

    hidden_size: int
    layers_to_capture: tuple[int, ...] = ()
    spec_resource_manager: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_capture_tokens = 0
        width = self.hidden_size * len(self.layers_to_capture)
        self.hidden_states = torch.zeros(self.max_num_tokens, width, dtype=torch.int64, device=self.device)

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step."""
        super().prepare()
        self.num_capture_tokens = self.num_tokens

    def is_layer_capture(self, layer_id: int) -> bool:
        """Whether the drafter reads this layer's output."""
        return layer_id in self.layers_to_capture

    def maybe_capture_hidden_states(self, layer_id: int, hidden_states: Tensor) -> None:
        """Copy the output of a layer into its columns, one row per token of the step."""
        start = self.layers_to_capture.index(layer_id) * self.hidden_size
        rows = slice(0, self.num_capture_tokens)
        self.hidden_states[rows, start : start + self.hidden_size].copy_(hidden_states[rows])


class Eagle3OneModelWorker(LinearSpecWorker):
    """Eagle3, and MTP-Eagle when the configured mode says so."""

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__(spec_config)
        self.is_mtp_eagle = spec_config.spec_dec_mode.is_mtp_eagle_one_model()

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


DRAFTERS = (
    Drafter(
        name="Eagle3OneModelWorker",
        mode=SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
        worker=lambda setting: Eagle3OneModelWorker(setting.spec_config),
        spec_metadata=lambda setting, _: Eagle3OneModelSpecMetadata(**setting.sizes, **setting.capture),
        draft_model=lambda setting: Eagle3DraftModel(setting.tracer, setting.steering, setting.head()),
    ),
)
