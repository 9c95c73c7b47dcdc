"""Suffix automata beside a draft model: where one finds a long match, what followed that are the drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager


class SADraftEnhancer:
    """Extends the texts of the generations before a worker drafts, and overrides its drafts afterwards.

    Upstream extends on a stream of its own, beside the draft model's, and lets its buffers grow; here there is one
    stream, and the buffers are large enough from the beginning, as graphs remember where they are.

    threshold     shortest match that overrides
    match_len     int64 [max_num_requests], device: length of each generation's match
    draft_tokens  int32 [max_num_requests, max_draft_len], device: what followed it
    """

    def __init__(self, threshold: int, max_num_requests: int, max_draft_len: int, device: torch.device) -> None:
        self.threshold = threshold
        self.match_len = torch.zeros(max_num_requests, dtype=torch.int64, device=device)
        self.draft_tokens = torch.zeros(max_num_requests, max_draft_len, dtype=torch.int32, device=device)

    def extend_and_prepare(
        self,
        sa_manager: SuffixAutomatonManager,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        num_gens: int,
        num_contexts: int,
        max_draft_len: int,
    ) -> None:
        """Append to the text of each generation what it accepts, and keep what its automaton drafts.

        Of ``accepted_tokens``, int32 [n, any], the rows of the generations and the first ``max_draft_len + 1``
        columns count, in which there are ``num_accepted_tokens``, int32 [n].
        """
        if num_gens:
            gens = slice(num_contexts, num_contexts + num_gens)
            accepted = accepted_tokens[gens, : max_draft_len + 1].contiguous()
            match_len, tokens = sa_manager.extend(accepted, num_accepted_tokens[gens], max_draft_len)
            self.match_len[:num_gens].copy_(match_len)
            self.draft_tokens[:num_gens, :max_draft_len].copy_(tokens)

    def maybe_override_all_draft_tokens(self, draft_tokens: Tensor) -> Tensor:
        """``draft_tokens`` of the generations, int32 [G, K], with the automaton's in rows whose match is long enough.

        To be called after ``extend_and_prepare`` of the same forward.
        """
        num_gens, draft_len = draft_tokens.shape
        takes_over = self.match_len[:num_gens] >= self.threshold
        return torch.where(takes_over.unsqueeze(1), self.draft_tokens[:num_gens, :draft_len], draft_tokens)
