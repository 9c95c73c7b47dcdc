"""Pages that are known by the prompt tokens which they hold, so that a later prompt need not compute them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engines.portable.pyexecutor.llm_request import LlmRequest


@dataclass
class KnownBlock:
    """A page that is known.

    key     prompt tokens up to its end, and those behind it on which what it holds depends
    owners  requests that have it
    """

    key: tuple[int, ...]
    owners: int


class ReusableBlocks:
    """The known pages of one pool; those that nobody has can be had in the order in which they were released.

    look_ahead  tokens behind a page on which a drafter's slots in it depend
    """

    def __init__(self, tokens_per_block: int, look_ahead: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.look_ahead = look_ahead
        self._blocks: dict[int, KnownBlock] = {}
        self._by_key: dict[tuple[int, ...], int] = {}
        # A dictionary, as it keeps its order.
        self._cached: dict[int, None] = {}

    def __len__(self) -> int:
        """Known pages that nobody has."""
        return len(self._cached)

    def known(self) -> dict[int, KnownBlock]:
        """Known pages by id."""
        return dict(self._blocks)

    def reclaim_order(self) -> list[int]:
        """Ids of those that nobody has; the first is taken first."""
        return list(self._cached)

    def find(self, prompt: Sequence[int]) -> list[int]:
        """Pages that hold the beginning of a prompt, in order; they leave a token of it at least to be computed."""
        last = len(prompt) - max(1, self.look_ahead)  # a key has the tokens that it looks ahead, too
        found = (self._by_key.get(key, -1) for key in self._keys(prompt, last))
        return list(takewhile(lambda block_id: block_id >= 0, found))

    def claim(self, block_ids: Sequence[int]) -> None:
        """One request more has these known pages."""
        for block_id in block_ids:
            self._blocks[block_id].owners += 1
            self._cached.pop(block_id, None)

    def store(self, prompt: Sequence[int], block_ids: Sequence[int]) -> None:
        """The pages of a request whose prompt is computed are known, but for those whose like is known already."""
        for key, block_id in zip(self._keys(prompt, len(prompt) - self.look_ahead), block_ids):
            if key not in self._by_key:
                self._by_key[key] = block_id
                self._blocks[block_id] = KnownBlock(key, owners=1)

    def release(self, block_id: int) -> bool:
        """One request less has this page. Returns whether nobody has it and nothing is known of it."""
        block = self._blocks.get(block_id)
        if block is None:
            return True
        block.owners -= 1
        if not block.owners:
            self._cached[block_id] = None
        return False

    def reclaim(self) -> int:
        """The page that is taken first, of which nothing is known any more."""
        block_id = next(iter(self._cached))
        del self._cached[block_id]
        del self._by_key[self._blocks.pop(block_id).key]
        return block_id

    def reset(self) -> list[int]:
        """Forget all of them. Returns those that nobody had."""
        free = list(self._cached)
        self._blocks, self._by_key, self._cached = {}, {}, {}
        return free

    def _keys(self, prompt: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        """Of each page that ends with token ``most`` of a prompt, or before it."""
        for end in range(self.tokens_per_block, most + 1, self.tokens_per_block):
            yield tuple(prompt[: end + self.look_ahead])


def find_reused_tokens(pools: Sequence[ReusableBlocks], request: LlmRequest) -> int:
    """Tokens at the beginning of a prompt that known pages of every pool hold, none of them in part."""
    tokens = min(len(pool.find(request.prompt)) * pool.tokens_per_block for pool in pools)
    while any(tokens % pool.tokens_per_block for pool in pools):
        tokens -= 1
    return tokens
