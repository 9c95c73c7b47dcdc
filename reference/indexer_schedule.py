"""How the indexer's kernels split the tokens of a generation between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

KEYS_OF_A_SPLIT: Final = 256
"""Keys that one multiprocessor goes through at a time."""


class Split(NamedTuple):
    """``factor`` rows of ``atom`` tokens each for a generation of ``factor * atom`` tokens."""

    factor: int
    atom: int


def split(next_n: int, atoms: Sequence[int], *, generations: int, longest: int, num_sms: int) -> Split:
    """The split of ``next_n`` tokens that takes the fewest waves over all multiprocessors, of equal ones the finest.

    atoms    tokens that a row can have: 1 to 3 in FP4, 1 to 4 in FP8
    longest  keys of the longest generation
    """
    shares = -(-longest // KEYS_OF_A_SPLIT)
    candidates = [Split(next_n // atom, atom) for atom in atoms if next_n % atom == 0]
    return min(candidates, key=lambda split: (-(-generations * split.factor * shares // num_sms), -split.factor))
