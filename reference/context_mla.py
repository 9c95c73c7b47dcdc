"""Contexts that read cached tokens of theirs through a buffer of limited size (MLA with cached KV)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

SKIP, MERGE, COPY = 0, 1, 2
"""What becomes of a partial result: nothing to do, added to those before it, the first of its request."""


class ChunkPlan(NamedTuple):
    """Per loop and request.

    lengths  cached tokens that the loop reads (upstream: ``chunked_seq_len``)
    offsets  what a request has had after the loop before, if that loop read any of it, else 0; one row more for the
             end (``chunked_global_offset``)
    merges   how the loop's result is joined; one row more for the step's own tokens (``merge_op_tensor``)
    """

    lengths: list[list[int]]
    offsets: list[list[int]]
    merges: list[list[int]]


def chunk_plan(cached: Sequence[int], buffer: int) -> ChunkPlan:
    """The cached tokens of all contexts, one request after the other, ``buffer`` of them per loop."""
    starts = list(accumulate(cached, initial=0))
    loops = [(begin, begin + buffer) for begin in range(0, starts[-1], buffer)]
    had = [
        [(max(start, begin) - start, min(start + length, end) - start) for start, length in zip(starts, cached)]
        for begin, end in loops
    ]
    lengths = [[max(0, end - begin) for begin, end in row] for row in had]
    return ChunkPlan(
        lengths,
        [[0] * len(cached)] + [[end if end > begin else 0 for begin, end in row] for row in had],
        [[SKIP if end <= begin else MERGE if begin else COPY for begin, end in row] for row in had]
        + [[MERGE if length else COPY for length in cached]],
    )
