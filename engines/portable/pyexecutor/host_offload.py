"""Pages that move between the pool and the host, so that a page's id is not where it lies (PR #13124)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class HostOffload:
    """Which pages are in the pool, and where; the host has room for as many again.

    A page keeps its id wherever it is. Only pages in the pool can be granted, so the ids of granted pages need not be
    below ``num_blocks``.
    """

    def __init__(self, num_blocks: int) -> None:
        self._memory_pool_indices = {block_id: block_id for block_id in range(num_blocks)}
        self._on_host = list(range(num_blocks, 2 * num_blocks))

    def memory_pool_indices(self, block_ids: Sequence[int]) -> list[int]:
        """Where pages lie in the pool; raises ``KeyError`` for one that is on the host."""
        return [self._memory_pool_indices[block_id] for block_id in block_ids]

    def swap(self, free_blocks: list[int], pools: Tensor) -> None:
        """Between two steps: every page moves on by one place, and the free ones change theirs with those on the host.

        free_blocks  ids of the pages that nobody owns, in the order in which they are granted; rewritten in place
        pools        [layers, num_blocks, tokens]: what they hold moves with the pages
        """
        num_blocks = pools.shape[1]
        pools.copy_(pools.roll(1, dims=1))
        places = {block_id: (place + 1) % num_blocks for block_id, place in self._memory_pool_indices.items()}
        onboarded = self._on_host[: len(free_blocks)]
        for block_id, offloaded in zip(onboarded, free_blocks):
            places[block_id] = places.pop(offloaded)
        self._memory_pool_indices = places
        self._on_host = [*self._on_host[len(free_blocks) :], *free_blocks]
        free_blocks[:] = onboarded
