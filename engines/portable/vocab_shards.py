"""A draft head whose vocabulary is cut over the ranks of tensor parallelism, as one rank sees it.

All of these ranks have the same rows. The head gives this one the logits of every shard, of which it looks at its own;
what the other ranks tell follows from theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor


class VocabShards:
    """The part of a vocabulary that rank ``tp_rank`` of ``tp_size`` has: one of as many consecutive parts."""

    def __init__(self, tp_size: int, tp_rank: int) -> None:
        self.tp_size = tp_size
        self.tp_rank = tp_rank

    def argmax(self, logits: Tensor) -> Tensor:
        """The best token of each row of ``logits``, float32 [..., vocabulary]: int64 [...].

        Each rank tells the best token of its shard and that token's logit; the best of these is the same on all ranks.
        """
        best = self.local_argmax(self.shard(logits, self.tp_rank), self.first_token(logits, self.tp_rank))
        return self.merge(self.allgather(best, logits))

    def first_token(self, logits: Tensor, rank: int) -> int:
        """Where the shard of a rank begins in the vocabulary."""
        return rank * logits.shape[-1] // self.tp_size

    def shard(self, logits: Tensor, rank: int) -> Tensor:
        """Logits of the tokens that a rank has."""
        return logits[..., self.first_token(logits, rank) : self.first_token(logits, rank + 1)]

    @staticmethod
    def local_argmax(shard: Tensor, first_token: int) -> Tensor:
        """The best token of a shard by its place in the whole vocabulary, and its logit: float32 [..., 2]."""
        values, places = shard.max(dim=-1)
        return torch.stack([(places + first_token).float(), values], dim=-1)

    def allgather(self, best: Tensor, logits: Tensor) -> Tensor:
        """What this rank tells, float32 [..., 2], in between what the others tell: float32 [..., 2 * tp_size]."""
        told = [best if rank == self.tp_rank else self.told_by_other(logits, rank) for rank in range(self.tp_size)]
        return torch.cat(told, dim=-1)

    def told_by_other(self, logits: Tensor, rank: int) -> Tensor:
        """What another rank makes of its shard; here it is data.

        It does not go through ``local_argmax``, so that a mistake there is one of this rank alone.
        """
        values, places = self.shard(logits, rank).max(dim=-1)
        return torch.stack([(places + self.first_token(logits, rank)).float(), values], dim=-1)

    @staticmethod
    def merge(told: Tensor) -> Tensor:
        """The token with the highest logit among those that the ranks tell: int64 [...]."""
        winner = told[..., 1::2].argmax(dim=-1, keepdim=True)
        return told[..., 0::2].gather(-1, winner).squeeze(-1).long()
