"""Prompts that begin alike, where pages can be reused: how long they are, and how much of them is another one's."""

from __future__ import annotations

from math import lcm
from typing import Any, Final

from scenarios import Config
from strategies.choices import Draw, choose
from strategies.sizes import prompt_lens

_SOURCES: Final = (None, 0, 0, 0, -1)
"""Whose beginning a prompt has: its own, mostly that of the first one, sometimes that of the one before."""


def draw_prompt(draw: Draw, config: Config, request: int, longest: int) -> dict[str, Any]:
    """What a ``Request`` says of its prompt, which has at most ``longest`` tokens."""
    table = prompt_lens(config, longest)
    if not config.enable_block_reuse:
        return {"prompt_len": choose(draw, table)}
    unit = lcm(*(size for _, size in config.pools))
    # One that has no full page, or nothing behind it, neither leaves nor finds anything.
    prompt_len = choose(draw, (*table, *[n for n in table if n > unit] * 3))
    source = choose(draw, _SOURCES) if request else None
    if source is None:
        return {"prompt_len": prompt_len}
    source = source if source >= 0 else request - 1
    return {"prompt_len": prompt_len, "prefix_of": source, "prefix_len": choose(draw, _prefix_lens(prompt_len, unit))}


def _prefix_lens(prompt_len: int, unit: int) -> tuple[int, ...]:
    """All of the prompt, and where the tokens part around the end of a page: just behind it, at it, just before it."""
    ends = range(unit, prompt_len, unit)
    near = [n for end in ends for n in (end + 1, end, end + 1, end - 1) if 1 <= n < prompt_len]
    return (prompt_len, *near, prompt_len)
