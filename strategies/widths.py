"""Verify widths: how many of its drafts each generation verifies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from scenarios import Config
from strategies.choices import Draw, choose, digits

_SEVERAL: Final = 2
"""Generations side by side, between which widths can differ."""
_STEPS: Final = 2
"""Steps that each of them can have: drafts of the first are verified in the second."""


def holds_several(config: Config) -> bool:
    """Whether two generations fit side by side, for two steps at least: a single one shows little of widths."""
    fed = config.tokens_per_gen_step(config.max_draft_len)
    tokens = _SEVERAL * (1 + config.num_extra_kv_tokens + (1 + _STEPS) * fed)
    return (
        config.max_num_requests >= _SEVERAL
        and config.max_num_tokens >= _SEVERAL * fed
        and all(blocks * size >= tokens for blocks, size in config.pools)
    )


def draw_widths(draw: Draw, config: Config, draft_len: int, rows: int, sums: Collection[int] = ()) -> list[int | None]:
    """What each of so many generations verifies of ``draft_len`` drafts, None for all; always that without widths.

    sums  numbers of rows of all of them, of which it is to be one: those of graphs that could be replayed
    """
    if not config.ragged_verify or not rows:
        return [None] * rows
    # The simplest verifies all, and any other number is as likely.
    drawn = [draft_len if digit == 0 else digit - 1 for digit in digits(draw, (1 + draft_len,) * rows)]
    if sums:
        _meet(drawn, choose(draw, sorted(sums, reverse=True)) - rows, draft_len)
    return [None if width == draft_len else width for width in drawn]


def _meet(widths: list[int], total: int, most: int) -> None:
    """Change as few of the widths, each 0..``most``, from the last one on, as their sum needs to be ``total``."""
    for i in reversed(range(len(widths))):
        wanted = widths[i] + total - sum(widths)
        widths[i] = max(0, min(wanted, most))
