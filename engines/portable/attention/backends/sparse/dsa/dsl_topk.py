"""How the DSL kernel for paged logits splits the rows of a generation over the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FP4_ATOMS: Final = (1, 2, 3)
FP8_ATOMS: Final = (1, 2, 3, 4)
"""Rows that one unit of work handles, by the type of the keys."""

_KEYS_PER_UNIT: Final = 256


def pick_split(
    next_n: int, atoms: Sequence[int], num_generations: int | None, max_kv: int | None, num_sms: int
) -> tuple[int, int]:
    """Parts that each generation's ``next_n`` rows are split into, and rows of a part: their product is ``next_n``.

    Of all splits the one with the fewest waves of work, of those with as few the one with more parts. Where the
    work is not known (None), the largest parts that there are.
    """
    splits = [(next_n // atom, atom) for atom in atoms if next_n % atom == 0]
    if num_generations is None or max_kv is None:
        return min(splits)
    units = num_generations * -(-max_kv // _KEYS_PER_UNIT)
    return min(splits, key=lambda split: (-(-units * split[0] // num_sms), -split[0]))
