"""Context MLA over what is cached: in which loops the cached tokens of a batch's contexts are attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

COPY_RESULT: Final = 2
MERGE_RESULT: Final = 1
NO_RESULT: Final = 0


@dataclass(frozen=True)
class ChunkPlan:
    """Loops over cached tokens, one row each, a column per context.

    chunked_seq_len         tokens that a loop takes of each context
    chunked_global_offset   where they begin in it; one more row. 0 where the loop before did not touch the context
    merge_op                what is done with the loop's result: 2 copies, 1 merges it into the one so far, 0 nothing.
        The last row is that of the step's own tokens.
    """

    chunked_seq_len: list[list[int]]
    chunked_global_offset: list[list[int]]
    merge_op: list[list[int]]

    @property
    def cu_chunked_seq_len(self) -> list[list[int]]:
        """Running totals over the contexts, from 0 on."""
        return [[0, *accumulate(row)] for row in self.chunked_seq_len]

    @property
    def max_chunk_len_per_loop(self) -> list[int]:
        """Most tokens that a loop takes of a context."""
        return [max(row) for row in self.chunked_seq_len]


def plan_chunks(cached: Sequence[int], total_size: int) -> ChunkPlan:
    """Take ``total_size`` cached tokens per loop, from the first context on."""
    taken = [0] * len(cached)
    lens: list[list[int]] = []
    offsets = [[0] * len(cached)]
    merges: list[list[int]] = []
    while sum(taken) < sum(cached):
        budget = total_size
        row = []
        for have, wanted in zip(taken, cached):
            row.append(min(budget, wanted - have))
            budget -= row[-1]
        merges.append([(MERGE_RESULT if have else COPY_RESULT) if n else NO_RESULT for n, have in zip(row, taken)])
        taken = [have + n for n, have in zip(row, taken)]
        lens.append(row)
        offsets.append([have if n else 0 for n, have in zip(row, taken)])
    merges.append([MERGE_RESULT if n else COPY_RESULT for n in cached])
    return ChunkPlan(lens, offsets, merges)
