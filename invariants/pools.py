"""The pools of pages: the target's and, with a separate draft KV cache, the drafter's. Each has fields of its own."""

from __future__ import annotations

from typing import NamedTuple

from invariants.case import Moment
from scenarios import Config


class Pool(NamedTuple):
    """The pages of one KV-cache manager.

    owner             "target" or "draft", as ``kv_cache_manager`` says it
    num_blocks        pages
    tokens_per_block  tokens of a page
    """

    owner: str
    num_blocks: int
    tokens_per_block: int

    def field(self, name: str) -> str:
        """What the target's field ``name`` is called for this pool."""
        return f"draft_{name}" if self.owner == "draft" else name

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.tokens_per_block)


def pools(config: Config) -> list[Pool]:
    """The pools of an engine, the target's first."""
    return [Pool(owner, *sizes) for owner, sizes in zip(("target", "draft"), config.pools, strict=False)]


def read_by(config: Config, moment: Moment) -> Pool:
    """The pool that is read at ``moment``: the last one by a draft call, else the target's."""
    return pools(config)[-1 if moment.name.startswith("draft[") else 0]
