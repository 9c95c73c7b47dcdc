"""What parallel drafters share: KV lengths that move for their one forward, and how they come back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engines.portable._utils import is_graph_warmup
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.interface import SpecMetadata, SpecWorkerBase


class ParallelSpecWorker(SpecWorkerBase):
    """Base of PARD and DFlash. Upstream writes this once per worker.

    ``kv_lens_cuda`` grows by 1 per generation for the draft forward, as its rows start one position after the
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

    def _fields_to_save(self, attn_metadata: Any) -> tuple[str, ...]:
        fields = super()._fields_to_save(attn_metadata)
        return (*fields, "kv_lens_cuda") if is_graph_warmup(attn_metadata) else fields

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
        try:
            super()._ensure_spec_dec_state_restored(attn_metadata, spec_metadata)
        finally:
            # Left pending, it would be taken off the lengths of another batch.
            if self._kv_rewind_pending:
                self._apply_kv_rewind_after_draft(attn_metadata)
