"""MTP-Eagle with a dynamic tree of drafts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engines.portable.heads import SteeredTreeLogitsProcessor
from engines.portable.models import HIDDEN_SIZE, MTPEagleDraftModel
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Drafter
from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata
from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker, tree_manager
from engines.portable.speculative.linear import DraftInputs
from engines.portable.speculative.mode import SpeculativeDecodingMode


class MTPEagleDynamicTreeWorker(Eagle3OneModelDynamicTreeWorker):
    """The worker of mode MTP_EAGLE_ONE_MODEL; unlike its base it puts the KV lengths back, in place.

    Its layers see as many tokens as the base's. Upstream's see ``dynamic_tree_max_topK`` fewer of a generation, and
    write their nodes over what it has just accepted.
    """

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__(spec_config)
        self._saved_kv_lens_cuda: Tensor | None = None

    def _prepare_attn_metadata_for_spec_dec(self, attn_metadata: Any, *fields: str) -> None:
        self._saved_kv_lens_cuda = attn_metadata.kv_lens_cuda[: attn_metadata.num_seqs].clone()
        super()._prepare_attn_metadata_for_spec_dec(attn_metadata, *fields)

    def _restore_attn_metadata_from_spec_dec(self, attn_metadata: Any) -> None:
        attn_metadata.kv_lens_cuda[: attn_metadata.num_seqs].copy_(self._saved_kv_lens_cuda)
        super()._restore_attn_metadata_from_spec_dec(attn_metadata)

    def _forward_draft_model(
        self, draft_model: Any, inputs: DraftInputs, attn_metadata: Any, spec_metadata: Any, draft_step: int
    ) -> tuple[Tensor, Tensor]:
        # A layer feeds all nodes so far of each sequence.
        counts, num_seqs = spec_metadata.all_rank_num_tokens, spec_metadata.all_rank_num_seqs
        if draft_step and num_seqs is not None:
            counts = [count * draft_step * self.dynamic_tree_max_topK for count in num_seqs]
        if counts is not None:
            attn_metadata.all_rank_num_tokens = counts
        hidden = draft_model.mtp_layers[0](
            embed_tokens=draft_model.embed_tokens,
            all_rank_num_tokens=counts,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            **inputs,
        )
        return hidden, hidden


DRAFTERS = (
    Drafter(
        name="MTPEagleDynamicTreeWorker",
        mode=SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
        use_dynamic_tree=True,
        worker=lambda setting: MTPEagleDynamicTreeWorker(setting.spec_config),
        spec_metadata=lambda setting, manager: Eagle3OneModelSpecMetadata(
            **setting.sizes, hidden_size=HIDDEN_SIZE, spec_resource_manager=manager
        ),
        draft_model=lambda setting: MTPEagleDraftModel(
            setting.tracer, setting.steering, SteeredTreeLogitsProcessor(setting.steering, setting.spec_config)
        ),
        resource_manager=tree_manager,
    ),
)
