"""DSpark: DFlash with a row less per block, as each predicts the token after its own, and a head that corrects them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.portable.speculative.dflash import DFlashWorker


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
