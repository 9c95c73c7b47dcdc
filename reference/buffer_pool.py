"""Which storage the metadata of graphs share: the pool that their buffers come from (upstream: ``Buffers``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Asked(NamedTuple):
    """A buffer of one name that somebody asks the pool for.

    size     bytes
    reserve  whether a graph will read it, so that nobody may drop it any more
    """

    size: int
    reserve: bool


def blocks(asked: Sequence[Asked]) -> list[int]:
    """The block that each is given, as the number of the one for which it was made.

    A graph takes the smallest block that is large enough, one of another graph if there is one. So graphs share what
    the largest of them, captured first, was given. Whoever asks without a graph gets a new block, and blocks that
    no graph reads are dropped whenever a new one is made.
    """
    made: list[tuple[int, Asked]] = []
    given: list[int] = []
    for number, (size, reserve) in enumerate(asked):
        candidate: tuple[int, Asked] | None = None
        for block in made if reserve else ():
            if block[1].size >= size and (candidate is None or _better(block[1], candidate[1])):
                candidate = block
        if candidate is None:
            made = [block for block in made if block[1].reserve]
            candidate = (number, Asked(size, reserve))
            made.append(candidate)
        elif not candidate[1].reserve:
            made[made.index(candidate)] = (candidate[0], candidate[1]._replace(reserve=True))
        given.append(candidate[0])
    return given


def _better(block: Asked, than: Asked) -> bool:
    return block.size < than.size and not (than.reserve and not block.reserve)
