"""Which members of a long list a run takes: some, evenly spread; the next turn others, and after some turns all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import pytest

T = TypeVar("T")
MARK: Final = "turns"
"""``turns(n)``: of a parametrised test a run takes every n-th member, each test beginning at another one."""


@dataclass(frozen=True)
class Sampled:
    """Takes members of lists: those of a turn, or all.

    turn   a number; consecutive ones take different members
    whole  whether all are taken
    """

    turn: int
    whole: bool = False

    def __call__(self, members: Sequence[T], most: int) -> list[T]:
        """``most`` of the members at most."""
        return self.every(members, max(1, -(-len(members) // most)))

    def every(self, members: Sequence[T], stride: int, begin: int = 0) -> list[T]:
        """Each ``stride``-th of the members, the first one of them ``begin`` places on from where the turn begins."""
        return list(members) if self.whole else list(members[(self.turn + begin) % stride :: stride])

    def thin(self, items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Tests that are taken, and members of marked ones that are not."""
        functions: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker(MARK):
                functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out: set[pytest.Item] = set()
        for begin, members in enumerate(functions.values()):
            (stride,) = next(members[0].iter_markers(MARK)).args
            left_out |= {*members} - {*self.every(members, stride, begin)}
        return [item for item in items if item not in left_out], [item for item in items if item in left_out]
