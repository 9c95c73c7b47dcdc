"""How many drafts a step makes, and with how many of them the target agrees."""

from __future__ import annotations

from hypothesis import strategies as st

from scenarios import Config
from scenarios.limits import check_config
from strategies.choices import Draw, choose, digits, in_range, pick
from strategies.sizes import draft_lens


def draft_lengths(config: Config) -> st.SearchStrategy[int]:
    """Runtime draft lengths K of a step, from the worker's smallest to ``max_draft_len``.

    With drafts accepted by force there are at least as many. Shrinks to 1. Zero and the maximum are drawn twice as
    often as the others, so that a few steps in a row go K, 0, K or shrink and grow; with verify widths it is the
    maximum alone, three times as often. Raises ``UsageError`` for a configuration that is not valid.
    """
    check_config(config)
    return st.sampled_from(draft_lens(config))


def agreements(draft_len: int, *, rows: int) -> st.SearchStrategy[tuple[int, ...]]:
    """With how many of its ``draft_len`` drafts the target agrees, for each of ``rows`` rows.

    A quarter of the time nothing anywhere, a quarter everything everywhere, else each row for itself: equal counts
    hide a row that got its neighbour's. Shrinks to zeros. Raises ``UsageError`` for a negative argument.
    """
    in_range("agreements", "draft_len", draft_len, 0)
    in_range("agreements", "rows", rows, 0)
    return _agreements(draft_len, rows)


@st.composite
def _agreements(draw: st.DrawFn, draft_len: int, rows: int) -> tuple[int, ...]:
    return draw_agreements(draw, draft_len, rows)


def draw_agreements(draw: Draw, draft_len: int, rows: int, least: int = 0) -> tuple[int, ...]:
    """As ``agreements``, with the ``draw`` of a composite strategy; each row agrees with ``least`` drafts at least."""
    options = draft_len - least + 1
    if options == 1 or rows == 0:
        return (least,) * rows
    if rows == 1:
        return (least + pick(draw, options),)
    mode = pick(draw, 4)
    if mode < 2:
        return (draft_len if mode else least,) * rows
    return tuple(least + extra for extra in digits(draw, (options,) * rows))


def draw_draft_len(draw: Draw, config: Config, *, of_dummies: bool = False, fails: bool = False) -> int:
    """A draft length as in ``draft_lengths``; one of dummies may be smaller than what is accepted by force.

    Of a step that ``fails`` it is the larger of two: a loop of one round has no middle.
    """
    table = draft_lens(config, of_dummies=of_dummies)
    draft_len = choose(draw, table)
    return max(draft_len, choose(draw, table)) if fails else draft_len
