"""DraftTarget: a separate draft model, fed with tokens alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engines.portable._utils import is_graph_warmup
from engines.portable.distributed import all_rank_num_tokens_kept
from engines.portable.models import DraftTargetDraftModel
from engines.portable.speculative.drafter import Drafter
from engines.portable.speculative.interface import SpecMetadata
from engines.portable.speculative.linear import DraftInputs, LinearSpecWorker
from engines.portable.speculative.mode import SpeculativeDecodingMode


class DraftTargetOneModelSpecMetadata(SpecMetadata):
    """What DraftTarget knows of the step."""

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step."""
        super().prepare()
        self.num_tokens = self.dp_num_tokens(self.num_tokens, self.num_generations)

    def dp_num_tokens(self, num_tokens: int, num_generations: int) -> int:
        """Of a rank's tokens those that it tells the other ranks of attention data parallelism: all but drafts."""
        return num_tokens - num_generations * self.runtime_draft_len


class DraftTargetOneModelWorker(LinearSpecWorker):
    """Drafts with a model that knows nothing of the target's hidden states."""

    def _fields_to_save(self, attn_metadata: Any) -> tuple[str, ...]:
        fields = super()._fields_to_save(attn_metadata)
        return (*fields, "kv_lens_cuda") if is_graph_warmup(attn_metadata) else fields

    def _prepare_attn_metadata_for_draft_target(self, attn_metadata: Any, spec_metadata: Any) -> None:
        """Save what drafting changes; while a graph warms up the KV lengths too, which its forwards share."""
        self._prepare_attn_metadata_for_spec_dec(attn_metadata)

    _save_attn_metadata = _prepare_attn_metadata_for_draft_target

    def _drafter_hidden_states(self, draft_model: Any, hidden_states: Tensor, spec_metadata: SpecMetadata) -> None:
        return None

    def _forward_draft_loop(
        self, draft_model: Any, inputs: DraftInputs, num_accepted: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> Tensor:
        """The base's, at the end of which the counts of the ranks are the target's again (PR #16325)."""
        with all_rank_num_tokens_kept(attn_metadata):
            return super()._forward_draft_loop(draft_model, inputs, num_accepted, attn_metadata, spec_metadata)

    def _forward_draft_model(
        self, draft_model: Any, inputs: DraftInputs, attn_metadata: Any, spec_metadata: SpecMetadata, draft_step: int
    ) -> tuple[Tensor, Tensor]:
        if draft_step and spec_metadata.all_rank_num_seqs is not None:
            attn_metadata.all_rank_num_tokens = spec_metadata.all_rank_num_seqs
        hidden = draft_model.model(**inputs, attn_metadata=attn_metadata, spec_metadata=spec_metadata)
        return hidden, hidden

    def _draft_logits(self, draft_model: Any, hidden_states: Tensor, attn_metadata: Any) -> Tensor:
        logits: Tensor = draft_model.logits_processor(hidden_states, draft_model.lm_head, attn_metadata, True)
        return logits


DRAFTERS = (
    Drafter(
        name="DraftTargetOneModelWorker",
        mode=SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL,
        worker=lambda setting: DraftTargetOneModelWorker(setting.spec_config),
        spec_metadata=lambda setting, _: DraftTargetOneModelSpecMetadata(**setting.sizes),
        draft_model=lambda setting: DraftTargetDraftModel(
            setting.tracer, setting.steering, setting.head(), setting.draft_experts
        ),
    ),
)
