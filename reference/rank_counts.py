"""What every rank is told of the others under attention data parallelism."""

from __future__ import annotations

from collections.abc import Sequence


def num_tokens(ranks: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each rank's batch, given the tokens of its rows (upstream: ``all_rank_num_tokens``)."""
    return [sum(rows) for rows in ranks]


def num_seqs(ranks: Sequence[Sequence[int]]) -> list[int]:
    """Rows of each rank's batch (``all_rank_num_seqs``), and tokens of each later draft call of a linear loop, which
    feeds one per row (``subseq_all_rank_num_tokens``).
    """
    return [len(rows) for rows in ranks]
