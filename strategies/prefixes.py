"""Prompts that begin alike, where pages can be reused: how long they are, and how much of them is another one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Final

from scenarios import Config, Request, Schedule
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
_OLDEST: Final = -2
"""Stands for the request whose pages give way next."""
_SOURCES: Final[tuple[int | None, ...]] = (None, 0, 0, 0, 0, 0, 0, -1)
"""Whose beginning a prompt has: its own, mostly that of the first one, sometimes that of the one before."""
_SOURCES_IN_NEED: Final[tuple[int | None, ...]] = (*_SOURCES, *(_OLDEST,) * 4)
"""The same where pages are about to give way, which it may find just in time."""
_SOURCES_BEFORE_OTHERS: Final[tuple[int | None, ...]] = (None, 0, None, -1)
"""The same where other prompts start behind it: what they are about to begin with, it may make give way."""


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


def next_to_go(schedule: Schedule, requests: Sequence[Request]) -> Request | None:
    """Whose own tokens fill the known page that gives way first; None where there is no such page."""
    for pool in schedule.reuse.pools:
        key = next(iter(pool.cached), ())
        for request in requests if key else ():
            own = replace(request, prefix_of=None, prefix_len=0).prompt(schedule.config.seed)
            if tuple(own[: len(key)]) == key:
                return request
    return None


def draw_prompt(draw: Draw, config: Config, request: int, space: Space, oldest: Request | None) -> dict[str, Any]:
    """What a ``Request`` says of its prompt, for which there is so much ``space``.

    oldest  the request whose pages give way next
    """
    table = prompt_lens(config, space.longest)
    if not config.enable_block_reuse:
        return {"prompt_len": choose(draw, table)}
    unit = lcm(*(size for _, size in config.pools))
    # One that has no full page, or nothing behind it, neither leaves nor finds anything; a long one leaves no room.
    few = [n for n in table if unit < n <= _FEW * unit] or table
    filling = _filling(space, unit, max(1, config.least_history)) or few
    prompt_len = choose(draw, choose(draw, (filling, few, filling) if space.later else (table, few, filling)))
    again = oldest is not None and oldest.prompt_len <= space.longest
    sources = _SOURCES_BEFORE_OTHERS if space.later else _SOURCES_IN_NEED if again else _SOURCES
    source = choose(draw, sources) if request else None
    if source is None:
        return {"prompt_len": prompt_len}
    if source == _OLDEST and oldest is not None:
        longer = min(oldest.prompt_len + choose(draw, (1, 0, unit)), space.longest)
        return {"prompt_len": longer, "prefix_of": oldest.id, "prefix_len": oldest.prompt_len}
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
