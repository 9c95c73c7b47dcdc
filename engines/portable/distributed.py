"""Attention data parallelism as one rank sees it: collectives with ranks that are data.

The other ranks run the same code on other batches, so what they contribute to a collective follows from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scenarios.tracer import MOE_MAX_NUM_TOKENS


@dataclass(frozen=True)
class PeerBatch:
    """The batch of another rank: tokens of each context, and generations."""

    chunks: tuple[int, ...]
    num_generations: int

    @property
    def num_seqs(self) -> int:
        """Its rows."""
        return len(self.chunks) + self.num_generations

    def num_tokens(self, tokens_per_gen_step: int) -> int:
        """Tokens that it feeds to the target."""
        return sum(self.chunks) + self.num_generations * tokens_per_gen_step


class Distributed:
    """This rank among ``tp_size``: what it tells the others, and what they tell.

    scheduled  batches of the others as their executors schedule them, in rank order
    running    the same as they run, dummies included
    calls      collectives since ``begin``: name, and what each rank contributed
    """

    def __init__(self, tp_size: int = 1, tp_rank: int = 0) -> None:
        self.tp_size = tp_size
        self.tp_rank = tp_rank
        self.begin((), ())

    @property
    def enable_attention_dp(self) -> bool:
        """Whether there are other ranks."""
        return self.tp_size > 1

    def begin(self, scheduled: Sequence[PeerBatch], running: Sequence[PeerBatch]) -> None:
        """A step begins, in which the others have these batches."""
        self.scheduled, self.running = tuple(scheduled), tuple(running)
        self.calls: list[tuple[str, list[int]]] = []

    def tp_allgather(self, name: str, own: int, others: Sequence[int]) -> list[int]:
        """Tell ``own`` to the others, who tell ``others``: one number per rank, in rank order."""
        values = [*others[: self.tp_rank], own, *others[self.tp_rank :]]
        self.calls.append((name, values))
        return values

    def allgather_rows(self, name: str, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of all ranks, of which rank ``r`` has ``sizes[r]``; those of the others are zero.

        Raises ``RuntimeError`` if this rank has another number of them: the real collective would hang or mix them up.
        """
        if len(rows) != sizes[self.tp_rank]:
            raise RuntimeError(
                f"{name}: rank {self.tp_rank} has {len(rows)} rows and all_rank_num_tokens says {sizes[self.tp_rank]}"
            )
        self.calls.append((name, list(sizes)))
        before, behind = sum(sizes[: self.tp_rank]), sum(sizes[self.tp_rank + 1 :])
        return torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows, rows.new_zeros(behind, *rows.shape[1:])])


class FusedMoE(nn.Module):
    """Experts that all ranks share: each rank's rows go to all of them, and come back (as they were, here)."""

    def __init__(self, dist: Distributed, name: str) -> None:
        super().__init__()
        self.dist = dist
        self.name = name

    def forward(self, hidden_states: Tensor, all_rank_num_tokens: list[int] | None) -> Tensor:
        """``hidden_states``, [rows, ...], in as many rounds as the rank with most rows needs.

        Raises ``RuntimeError`` if ``all_rank_num_tokens`` is not what the ranks have.
        """
        if not self.dist.enable_attention_dp:
            return hidden_states
        if all_rank_num_tokens is None:
            raise RuntimeError(f"{self.name}: all_rank_num_tokens is not set")
        num_chunks = -(-max(all_rank_num_tokens) // MOE_MAX_NUM_TOKENS)
        begin, outputs = 0, []
        for chunk in range(num_chunks):
            sizes = [_chunk_size(count, num_chunks, chunk) for count in all_rank_num_tokens]
            end = len(hidden_states) if chunk == num_chunks - 1 else begin + sizes[self.dist.tp_rank]
            gathered = self.dist.allgather_rows(self.name, hidden_states[begin:end], sizes)
            first = sum(sizes[: self.dist.tp_rank])
            outputs.append(gathered[first : first + sizes[self.dist.tp_rank]])
            begin = end
        return torch.cat(outputs)


def _chunk_size(count: int, num_chunks: int, chunk: int) -> int:
    """Rows of a rank with ``count`` rows in one of ``num_chunks`` rounds."""
    return count // num_chunks + (chunk < count % num_chunks)


@contextmanager
def all_rank_num_tokens_kept(attn_metadata: Any) -> Iterator[None]:
    """Put ``all_rank_num_tokens`` back at the end, also after a failure: draft calls install lists of their own."""
    original = attn_metadata.all_rank_num_tokens
    try:
        yield
    finally:
        attn_metadata.all_rank_num_tokens = original
