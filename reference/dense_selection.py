"""Rows of a sparse backend that see everything anyway, so that their indexer is skipped."""

from __future__ import annotations

from collections.abc import Sequence


def skips(kv_lens: Sequence[int], extra: int, topk: int) -> bool:
    """Whether the indexer is skipped for rows of these KV lengths: none can outgrow the selection in this step.

    extra  tokens by which the draft loop may lengthen a row
    """
    return bool(kv_lens) and max(kv_lens) + extra <= topk


def dense(position: int, topk: int) -> list[int]:
    """What a row selects then: everything up to its own position, in order.

    A row beyond the selection's width would see its beginning only, without the newest tokens, so that no such row
    may be skipped.
    """
    return list(range(min(position + 1, topk)))
