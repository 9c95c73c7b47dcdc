"""Prompts that begin alike, where pages can be reused: how long they are, and how much of them is another one's."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any, Final

from scenarios import Config
from scenarios.reuse import reuses_on
from strategies.choices import Draw, choose, pick
from strategies.layout import Space, pages
from strategies.sizes import NEAR, prompt_lens

_REUSES: Final = (False, False, True)
_REUSES_AMONG_RANKS: Final = (False, True)
"""Whether pages are reused; rather where dummies, which take the room of known ones, keep several ranks in step."""
_APART: Final = (False, True, True)
_LONG_PAGE: Final = 4
"""Tokens that a page has at most where it is to be reused."""
_FEW: Final = 4
"""Pages of a prompt that fits into a small pool, and of what may be left in it."""
_SOURCES: Final = (None, 0, 0, 0, 0, 0, 0, -1)
"""Whose beginning a prompt has: its own, mostly that of the first one, sometimes that of the one before."""
_SOURCES_BEFORE_OTHERS: Final = (None, 0, 0, None, -1, 0)
"""The same where other prompts start behind it: what they know, it may make give way."""


def draw_block_reuse(draw: Draw, config: Config) -> Config:
    """``config`` now and then with block reuse, if that is combined with it, and with pages that make it happen.

    Of a prompt full pages are reused, so they are short. And pages of two sizes seldom end together: the drafter's are
    made as long as the target's, half as long or twice; or half as long again, where only every other page ends
    with one of the target's.
    """
    # A recurrent state, drawn for every other case, gives way.
    without = replace(config, recurrent=False)
    table = _REUSES_AMONG_RANKS if config.attention_dp_size > 1 else _REUSES
    if not choose(draw, table) or not reuses_on(without):
        return config
    config = without
    if not config.compress_ratios and config.tokens_per_block > _LONG_PAGE:
        size = config.tokens_per_block - _LONG_PAGE
        blocks = pages(config.num_blocks * config.tokens_per_block, size)
        config = replace(config, tokens_per_block=size, num_blocks=blocks)
    size, block = config.draft_tokens_per_block, config.tokens_per_block
    wanted = size
    if size and block % 2 == 0 and choose(draw, _APART):
        wanted = block + block // 2
    elif size and block % size:
        wanted = 2 * block if size > block else block if block % 2 else block // 2
    if wanted != size:
        blocks = pages(config.draft_num_blocks * size, wanted)
        config = replace(config, draft_tokens_per_block=wanted, draft_num_blocks=blocks)
    return _with_small_pool(draw, replace(config, enable_block_reuse=True))


def _with_small_pool(draw: Draw, config: Config) -> Config:
    """``config``, mostly with one pool that holds a prompt of a few pages: what it knows soon gives way."""
    names = ("num_blocks", "draft_num_blocks")[: len(config.pools)]
    name = choose(draw, (None, names[-1], names[0], names[0]))
    if name is None:
        return config
    blocks, size = config.pools[names.index(name)]
    fed = config.tokens_per_gen_step(config.max_draft_len)
    least = pages(_FEW * size + config.num_extra_kv_tokens + fed, size) + pick(draw, 2 * _FEW)
    small: dict[str, Any] = {name: min(blocks, least)}
    return replace(config, **small)


def draw_prompt(draw: Draw, config: Config, request: int, space: Space) -> dict[str, Any]:
    """What a ``Request`` says of its prompt, for which there is so much ``space``."""
    table = prompt_lens(config, space.longest)
    if not config.enable_block_reuse:
        return {"prompt_len": choose(draw, table)}
    unit = lcm(*(size for _, size in config.pools))
    # One that has no full page, or nothing behind it, neither leaves nor finds anything; a long one leaves no room.
    few = [n for n in table if unit < n <= _FEW * unit] or table
    filling = _filling(space, unit, max(1, config.least_history)) or few
    prompt_len = choose(draw, choose(draw, (filling, few, filling) if space.later else (table, few, filling)))
    source = choose(draw, _SOURCES_BEFORE_OTHERS if space.later else _SOURCES) if request else None
    if source is None:
        return {"prompt_len": prompt_len}
    source = source if source >= 0 else request - 1
    return {"prompt_len": prompt_len, "prefix_of": source, "prefix_len": choose(draw, _prefix_lens(prompt_len, unit))}


def _filling(space: Space, unit: int, least: int) -> list[int]:
    """Prompts that leave no page blank, then such that make one page give way whose content is known, and two."""
    if space.blank >= space.longest or space.longest > NEAR:
        return []
    return [n for n in (space.blank, space.blank + 1, space.blank + 1 + unit) if least <= n <= space.longest]


def _prefix_lens(prompt_len: int, unit: int) -> tuple[int, ...]:
    """All of the prompt, or up to where the tokens part around the end of a page: just behind it, at it, before it."""
    ends = range(unit, prompt_len, unit)
    near = [n for end in ends for n in (end + 1, end, end + 1, end - 1) if 1 <= n < prompt_len]
    return (prompt_len, *near, *(prompt_len,) * len(near))
