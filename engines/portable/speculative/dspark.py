"""DSpark: DFlash with a row less per block, as each predicts the token after its own, and a head that corrects them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.portable.heads import LogitsProcessor
from engines.portable.models import DSparkDraftModel
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.speculative.dflash import DFlashWorker, in_slots, slotted_metadata
from engines.portable.speculative.drafter import Drafter
from engines.portable.speculative.mode import SpeculativeDecodingMode


class DSparkWorker(DFlashWorker):
    """The later version of upstream's worker; the earlier one kept windows of its own."""

    @property
    def _draft_block_width(self) -> int:
        return self.max_draft_len

    def _draft_slot_ids(self, draft_len: int, device: torch.device) -> Tensor:
        return torch.arange(draft_len, device=device)

    def _refine_block_logits(self, logits: Tensor, draft_model: Any, attn_metadata: Any) -> Tensor:
        corrected: Tensor = draft_model.markov_head(logits, attn_metadata)
        return corrected


DRAFTERS = (
    Drafter(
        name="DSparkWorker",
        mode=SpeculativeDecodingMode.DSPARK,
        worker=lambda setting: in_slots(DSparkWorker, setting),
        spec_metadata=slotted_metadata,
        # What is steered is not the head but what corrects it.
        draft_model=lambda setting: DSparkDraftModel(
            setting.tracer, setting.steering, LogitsProcessor(probabilities=setting.steering.probabilities)
        ),
        resource_manager=lambda setting: SeqSlotManager(setting.num_slots),
    ),
)
