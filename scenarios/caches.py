"""Which KV caches a configuration may have: one for target and drafter, or one each. And what they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scenarios.errors import ScenarioError, closest, require
from scenarios.model import KV_CACHE_MANAGERS, Config


def check_caches(config: Config) -> None:
    """Raise ``ScenarioError`` unless the manager is known, and a drafter's own cache, and only that, has pages."""
    if config.kv_cache_manager not in KV_CACHE_MANAGERS:
        problem = f"no KV-cache manager is called {config.kv_cache_manager!r}"
        raise ScenarioError("config.kv_cache_manager", problem, closest(config.kv_cache_manager, KV_CACHE_MANAGERS))
    separate = config.use_separate_draft_kv_cache
    if separate and not config.traits.separate_draft_kv_cache:
        problem = f"the drafter of {config.worker} keeps nothing in a KV cache"
        raise ScenarioError("config.use_separate_draft_kv_cache", problem, "leave it out")
    for name in ("draft_num_blocks", "draft_tokens_per_block"):
        value = getattr(config, name)
        if separate and not value:
            raise ScenarioError(f"config.{name}", "0 is too small for a separate draft KV cache", "write 1 or more")
        if value and not separate:
            problem = f"{value} is the size of a separate draft KV cache, and there is none"
            raise ScenarioError(f"config.{name}", problem, "leave it out or set config.use_separate_draft_kv_cache")


def pages(config: Config, granted: Collection[int], shared: Sequence[int] = ()) -> tuple[int, ...]:
    """Pages of each pool of ``Config.pools`` that sequences with so many tokens each take.

    ``shared``: by how much fewer each pool's are, as some sequences have pages in common.
    """
    saved = shared or [0] * len(config.pools)
    counts = (sum(-(-tokens // size) for tokens in granted) for _, size in config.pools)
    return tuple(count - fewer for count, fewer in zip(counts, saved))


def check_pools(config: Config, granted: Collection[int], field: str, shared: Sequence[int] = ()) -> None:
    """Every manager has the pages for what it is asked to grant (issue #18660: not the target's alone)."""
    counts = pages(config, granted, shared)
    for needed, (blocks, _), name in zip(counts, config.pools, ("num_blocks", "draft_num_blocks")):
        problem = f"{needed} KV-cache pages exceed {name} {blocks}"
        require(needed <= blocks, field, problem, f"end requests earlier or raise config.{name}")
