"""Which sizes are worth trying, simplest first: where the arithmetic of real engines has gone wrong.

Plain tables, computed once per configuration; an entry listed twice is twice as likely.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Final

from scenarios import Config
from strategies.acceptance import least_agreement

NEAR: Final = 64
"""Limits beyond so many tokens are not approached: what they would show, a smaller limit shows sooner."""


ALL: Final = 256
"""As many rows of this kind as there are."""

SHAPES: Final = (
    *((0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (2, 0), (0, 2), (1, 2), (2, 1), (0, 3), (2, 2)),
    *((0, ALL), (1, ALL), (0, ALL), (1, ALL), (0, ALL), (2, ALL), (ALL, ALL)),
)
"""Batch shapes (contexts, generations): small ones, then those that use all there is."""

GRAPHS: Final = ((0, 1), (0, 2), (0, 3), (0, 2), (0, 1), (0, 2), (0, ALL))
"""Batches for which a graph is captured."""


def fitting_shape(shape: tuple[int, int], contexts: int, generations: int, rows: int) -> tuple[int, int]:
    """``shape`` within these limits: for rows that there are not, rows of the other kind, if there are any.

    The table of shapes is the same for every step, and so a step keeps its shape when an earlier one is removed.
    """
    c, g = shape
    if g == ALL:
        fit_g = min(generations, rows)
        fit_c = min(c, contexts, rows - fit_g)
        return (fit_c, fit_g) if fit_c + fit_g else (min(contexts, rows, 2), 0)
    fit_g = min(g, generations, rows)
    fit_c = min(c + g - fit_g, contexts, rows - fit_g)
    return fit_c, min(c + g - fit_c, generations, rows - fit_c)


def least_draft_len(config: Config) -> int:
    """Smallest draft length of a step after which the request may have any other: acceptance by force needs drafts."""
    return max(config.min_draft_len, least_agreement(config, config.max_draft_len))


@lru_cache(maxsize=1024)
def draft_lens(config: Config, *, of_dummies: bool = False) -> tuple[int, ...]:
    """Runtime draft lengths K of a configuration: 1, then 0, then the rest; 0 and the maximum twice.

    K = 0 and a change through it (K, 0, K) left the drafter without the tokens in between (PR #16888). For dummies,
    which have no later step, all that the worker has. Where generations differ in how many they verify, longer ones;
    also where requests soon reach ``max_seq_len``, which drafts are granted pages beyond.
    """
    low, high = config.min_draft_len if of_dummies else least_draft_len(config), config.max_draft_len
    more = (high, high) if config.ragged_verify or config.max_seq_len <= NEAR else (0, high)
    return tuple(k for k in (1, 0, *range(2, high + 1), *more) if k >= low) if low < high else (high,)


@lru_cache(maxsize=1024)
def _prompt_lens(config: Config) -> tuple[int, ...]:
    block, k = config.tokens_per_block, config.max_draft_len
    width = config.tokens_per_gen_step(k)
    longest = config.max_seq_len - config.num_extra_kv_tokens
    wanted = {1, 2, 3}
    for boundary in (block, 2 * block, 3 * block):
        wanted.update(range(boundary - k - 1, boundary + 2))
    for limit in (longest, config.max_num_tokens):
        if limit <= NEAR:
            wanted.update((limit - 2 * width, limit - width - 1, limit - width, limit - width + 1, limit - 1, limit))
            wanted.update((limit + 1, limit + 2, 2 * limit, 2 * limit + 1))
    least = max(1, config.least_history)
    # With a limit below it no prompt fits at all.
    return tuple(sorted(n for n in {*wanted, least} if least <= n <= longest))


def prompt_lens(config: Config, most: int) -> tuple[int, ...]:
    """Prompt lengths of 1..``most``, shortest first, then ``most`` itself, which fills the room there is.

    They lie around the first block boundaries, from K + 1 before to 1 after, and around ``max_seq_len`` and
    ``max_num_tokens``: one token beyond the latter leaves a tail of one token for the second chunk. A third of them
    reach a near ``max_seq_len`` with the drafts that they feed.
    """
    table = _prompt_lens(config)
    within = table[: bisect_right(table, most)]
    whole = within if most > NEAR or within[-1] == most else (*within, most)
    return whole + _last_steps(config, most) * (len(whole) // 2)


@lru_cache(maxsize=1024)
def _last_steps(config: Config, most: int) -> tuple[int, ...]:
    """The prompt of a request that feeds its drafts once and then has no room for them, where ``max_seq_len`` is near.

    It is granted pages beyond the longest request there can be, which tables must have columns for.
    """
    width = config.tokens_per_gen_step(config.max_draft_len)
    longest = config.max_seq_len - config.num_extra_kv_tokens
    last = longest - width
    if longest > NEAR or not max(1, config.least_history) <= last <= most:
        return ()
    return (last,)


def chunk_lens(config: Config, past: int, left: int, most: int) -> tuple[int, ...]:
    """Chunks of a context with ``left`` prompt tokens to go, at most ``most`` of them now.

    As much as possible first (and three times in four); then all but a one-token tail, a single token, and up to
    the last block boundary.
    """
    whole = min(left, most)
    boundary = whole - (past + whole) % config.tokens_per_block
    parts = [n for n in dict.fromkeys((left - 1, 1, boundary)) if 1 <= n < whole]
    return (whole, *parts, *(whole,) * (3 * len(parts) - 1))
