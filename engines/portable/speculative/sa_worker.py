"""SA: drafts from the suffix automaton of a request's own text; there is no draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.portable.models import DraftModel
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Drafter, Setting
from engines.portable.speculative.interface import INVALID_PROMPT_LOOKAHEAD_TOKEN, SpecMetadata, SpecWorkerBase
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager


@dataclass(kw_only=True, eq=False)
class SASpecMetadata(SpecMetadata):
    """Adds the automata; a graph shares them, and which slots the rows have, with the eager steps."""

    sa_manager: SuffixAutomatonManager

    def _first_sa_row(self) -> int:
        return 0


class SAWorker(SpecWorkerBase):
    """Looks up how the text of each request goes on, contexts included; never touches the attention metadata."""

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__()
        self.spec_config = spec_config

    @property
    def max_draft_len(self) -> int:
        """Drafts per request at most."""
        return self.spec_config.max_draft_len

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
        if spec_metadata.runtime_draft_len == 0:
            return self.skip_drafting(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model
            )
        accepted, num_accepted = self._accept_drafts(logits, attn_metadata, spec_metadata)
        drafts = self._generate_draft_tokens(accepted, num_accepted, attn_metadata, spec_metadata)
        self._rollback_guided_decoder_after_verify(num_accepted)
        return self._outputs(logits, accepted, num_accepted, drafts)

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
        """A step without drafts: each row's own token, and none to come.

        The text grows all the same: a step that the automaton misses would leave a hole in it (PR #16888).
        """
        accepted, num_accepted = self._accept_own_tokens(logits, attn_metadata, spec_metadata)
        drafts = self._generate_draft_tokens(accepted, num_accepted, attn_metadata, spec_metadata)
        return self._outputs(logits, accepted, num_accepted, drafts)

    def _generate_draft_tokens(
        self, accepted: Tensor, num_accepted: Tensor, attn_metadata: Any, spec_metadata: SASpecMetadata
    ) -> Tensor:
        """Append what the step commits to the texts, and draft: int32 [n, K], padding where nothing matches."""
        committed = self._committed(num_accepted, attn_metadata, spec_metadata)
        match_len, drafts = spec_metadata.sa_manager.extend(accepted, committed, spec_metadata.runtime_draft_len)
        return drafts * (match_len > 0).int().unsqueeze(1)

    def _committed(self, num_accepted: Tensor, attn_metadata: Any, spec_metadata: SpecMetadata) -> Tensor:
        """Tokens that each row commits: none after a chunk that more of the prompt follows, which the text has."""
        num_contexts = attn_metadata.num_contexts
        is_last_chunk = spec_metadata.context_prompt_lookahead_tokens[:num_contexts] == INVALID_PROMPT_LOOKAHEAD_TOKEN
        return torch.cat([num_accepted[:num_contexts] * is_last_chunk, num_accepted[num_contexts:]])


def get_sa_manager(setting: Setting) -> SuffixAutomatonManager:
    """The automata that draft alone, or, with a threshold, those beside a draft model."""
    return SuffixAutomatonManager(
        setting.tracer,
        setting.steering,
        setting.spec_config.max_draft_len,
        setting.num_slots,
        setting.max_num_requests,
        setting.max_seq_len,
        setting.device,
        with_contexts=not setting.spec_config.sa_threshold,
    )


DRAFTERS = (
    Drafter(
        name="SAWorker",
        mode=SpeculativeDecodingMode.SA,
        worker=lambda setting: SAWorker(setting.spec_config),
        spec_metadata=lambda setting, manager: SASpecMetadata(**setting.sizes, sa_manager=manager),
        draft_model=lambda setting: DraftModel(setting.steering),
        resource_manager=get_sa_manager,
    ),
)
