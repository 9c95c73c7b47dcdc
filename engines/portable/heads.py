"""Heads of target and drafters: from hidden rows to logits, steered where a scenario says how well drafts agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.portable._utils import prefer_pinned
from engines.portable.copies import copy_to_device
from engines.portable.speculative.config import DecodingConfig
from engines.row_tracer import digests_of, with_digests
from engines.tracer import choose, disagree, log_probabilities, near, one_hot, two_choices
from scenarios.tracer import VOCAB_SIZE, d2t


class LMHead(nn.Module):
    """Turns the second column of hidden rows into tokens: int64 [rows]."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The second column as tokens."""
        return choose(hidden_states[:, 1])


class LogitsProcessor(nn.Module):
    """Logits of hidden rows: float32 [rows, VOCAB_SIZE]; of a first choice alone, or of a second one too.

    With ``probabilities`` they say more than what is chosen, as rejection sampling asks for: what it is chosen from.
    """

    def __init__(self, second_choice: bool = False, probabilities: bool = False) -> None:
        super().__init__()
        self._logits = two_choices if second_choice else one_hot
        self._probabilities = probabilities

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Logits of what ``lm_head`` makes of the rows. No context logits are asked for."""
        logits = self._logits(lm_head(hidden_states))
        return with_digests(logits, hidden_states[:, 1]) if self._probabilities else logits


class Steering:
    """Makes a drafter as good as a scenario wants it: which of a row's drafts the target will agree with.

    agree     int64 [max_num_requests], device: so many, from the first on, per row
    near      the same: to so many drafts, counted from the first on too, the target at least comes close
    depth     draft steps done in this forward
    sa_agree  as ``agree``, of the rows whose texts suffix automata extend
    sa_match  int64 [max_num_requests], device: length of the match in each of these texts
    probabilities  whether heads also say what they choose from, for rejection sampling
    d2t       int64 [VOCAB_SIZE], device: what is to be added to the head's token to have the target's; None when they
        speak the same vocabulary
    """

    def __init__(
        self,
        max_num_requests: int,
        device: torch.device,
        *,
        draft_vocab_map: bool = False,
        second_choice: bool = False,
        probabilities: bool = False,
    ) -> None:
        self.probabilities = probabilities
        self._rows, self._automata = torch.zeros(2, max_num_requests, 2, dtype=torch.int64, device=device)
        self.agree, self.near = self._rows.unbind(1)
        self.sa_agree, self.sa_match = self._automata.unbind(1)
        self._logits = two_choices if second_choice else one_hot
        self.depth = 0
        self.d2t = torch.tensor([d2t(i) for i in range(VOCAB_SIZE)], device=device) if draft_vocab_map else None
        self._token_of = None if self.d2t is None else self.d2t + torch.arange(VOCAB_SIZE, device=device)

    def in_draft_vocab(self, logits: Tensor) -> Tensor:
        """Logits of the target's tokens, [rows, VOCAB_SIZE], as the draft head has them."""
        return logits if self._token_of is None else logits.index_select(1, self._token_of)

    def logits(self, tokens: Tensor, digests: Tensor | None) -> Tensor:
        """Logits of a draft head that chooses ``tokens`` (int64 [rows]) from ``digests``, as it has them."""
        logits = self.in_draft_vocab(self._logits(tokens))
        return logits if digests is None or not self.probabilities else with_digests(logits, digests)

    def steer(self, agree: list[int], near: list[int]) -> None:
        """Set ``agree`` for the rows of the next step, and how many drafts behind these are to come close."""
        self._steer(self._rows, [value for a, n in zip(agree, near) for value in (a, a + n)])

    def steer_automata(self, agree: list[int], match: list[int]) -> None:
        """Set ``sa_agree`` and ``sa_match`` for the rows of the next step that have an automaton."""
        self._steer(self._automata, [value for pair in zip(agree, match) for value in pair])

    @staticmethod
    def _steer(rows: Tensor, values: list[int]) -> None:
        host = torch.tensor(values, dtype=torch.int64, pin_memory=prefer_pinned(rows.device)).view(-1, 2)
        copy_to_device("steering", rows[: len(host)], host)

    def disturb(self, tokens: Tensor, attn_metadata: Any) -> Tensor:
        """``tokens`` of the generations, int64 [G * drafts], some of them turned into ones to disagree with."""
        first, gens = attn_metadata.num_contexts, attn_metadata.num_generations
        depths = torch.arange(len(tokens) // gens, device=tokens.device)
        agrees = (self.agree[first : first + gens].unsqueeze(1) > depths).flatten()
        return torch.where(agrees, tokens, disagree(tokens))


class SteeredLogitsProcessor(nn.Module):
    """A draft head that disagrees where it is told to; one call per depth, or all depths in one when parallel."""

    def __init__(self, steering: Steering, parallel: bool) -> None:
        super().__init__()
        self.steering = steering
        self.parallel = parallel

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Logits of the drafts, float32 [rows, VOCAB_SIZE]; moves on by one depth unless parallel."""
        tokens = lm_head(hidden_states)
        if self.parallel:
            return self.steering.logits(self.steering.disturb(tokens, attn_metadata), hidden_states[:, 1])
        agrees = self.steering.agree[: len(tokens)] > self.steering.depth
        is_near = self.steering.near[: len(tokens)] > self.steering.depth
        self.steering.depth += 1
        others = torch.where(is_near, near(tokens), disagree(tokens))
        return self.steering.logits(torch.where(agrees, tokens, others), hidden_states[:, 1])


class SteeredMTPHead(SteeredLogitsProcessor):
    """The head of a layer of vanilla MTP, which finds the last row of each sequence itself."""

    def __init__(self, steering: Steering) -> None:
        super().__init__(steering, parallel=False)

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Logits of the drafts, float32 [n, VOCAB_SIZE], of rows int64 [tokens, 2]."""
        last_tokens = torch.cumsum(attn_metadata.seq_lens_cuda, dim=0) - 1
        return super().forward(hidden_states.index_select(0, last_tokens), lm_head, attn_metadata)


class SteeredTreeLogitsProcessor(nn.Module):
    """A draft head that offers several candidates per node: one is steered as a chain's draft at its depth.

    It is the best one, but for the last layer of trees that are no chains: verification has to look further there.
    """

    def __init__(self, steering: Steering, spec_config: DecodingConfig) -> None:
        super().__init__()
        self.steering = steering
        self.topk = spec_config.dynamic_tree_max_topK
        is_chain = spec_config.max_total_draft_tokens == spec_config.max_draft_len
        self.depth_with_decoys = None if is_chain else spec_config.max_draft_len - 1

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Log probabilities, float32 [n * nodes, VOCAB_SIZE], of the nodes of each row; moves on by one depth."""
        tokens = lm_head(hidden_states)
        batch_size = attn_metadata.num_seqs
        agrees = self.steering.agree[:batch_size].unsqueeze(1) > self.steering.depth
        agrees = agrees.expand(-1, len(tokens) // batch_size).flatten()
        first = torch.where(agrees, tokens, disagree(tokens))
        with_decoys = self.steering.depth == self.depth_with_decoys
        self.steering.depth += 1
        return self.steering.in_draft_vocab(log_probabilities(tokens, first, self.topk, with_decoys))


class MarkovHead(nn.Module):
    """Corrects the logits of a block, float32 [G, K, VOCAB_SIZE or more]: here is where DSpark is steered."""

    def __init__(self, steering: Steering) -> None:
        super().__init__()
        self.steering = steering

    def forward(self, block_logits: Tensor, attn_metadata: Any) -> Tensor:
        """The block's logits, some of their first choices turned into ones to disagree with."""
        tokens = torch.argmax(block_logits, dim=-1).flatten()
        digests = digests_of(block_logits).flatten() if self.steering.probabilities else None
        return self.steering.logits(self.steering.disturb(tokens, attn_metadata), digests).view_as(block_logits)
