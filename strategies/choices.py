"""The primitives from which every strategy is built: one cheap draw per choice, the simplest option first.

Hypothesis pays for each draw, and draws integers evenly only within 256 of zero. So a choice is an integer below
256, made by a strategy that exists once, and a row of small choices is packed into a single draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Final, Protocol, TypeVar

from hypothesis import strategies as st

from scenarios import UsageError

T = TypeVar("T")


class Draw(Protocol):
    """The ``draw`` of a composite strategy or of ``st.data()``."""

    def __call__(self, strategy: st.SearchStrategy[T]) -> T:
        """A value of the strategy."""
        ...


MANY: Final = 256
"""Options up to which a draw is even, and one choice is one draw."""

_BELOW: Final = tuple(st.sampled_from(range(max(n, 1))) for n in range(MANY + 1))


@cache
def _bytes(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def pick(draw: Draw, options: int) -> int:
    """An index in ``0..options-1``, each as likely as any other; 0 is the simplest. One option costs no draw."""
    if options <= 1:
        return 0
    if options <= MANY:
        return draw(_BELOW[options])
    high = pick(draw, -(-options // MANY))
    return high * MANY + pick(draw, min(MANY, options - high * MANY))


def choose(draw: Draw, table: Sequence[T]) -> T:
    """An entry of ``table``, the first being the simplest; an entry listed twice is twice as likely."""
    return table[pick(draw, len(table))]


def digits(draw: Draw, bases: Sequence[int]) -> list[int]:
    """One number in ``0..base-1`` for each base (at most 256), all of them in one draw."""
    packed = prod(bases)
    if packed > MANY:
        return [byte % base for byte, base in zip(draw(_bytes(len(bases))), bases)]
    value = pick(draw, packed)
    found = []
    for base in reversed(bases):
        value, digit = divmod(value, base)
        found.append(digit)
    return found[::-1]


def arrangement(draw: Draw, items: Sequence[T], size: int) -> list[T]:
    """``size`` of the items in any order; the simplest are the first ones as they stand."""
    left = list(items)
    return [left.pop(i) for i in digits(draw, range(len(items), len(items) - size, -1))]


def in_range(strategy: str, argument: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse an argument that is not a whole number in ``low..high``, or of ``low`` or more."""
    right = isinstance(value, int) and not isinstance(value, bool) and low <= value <= (value if high is None else high)
    if not right:
        wanted = f"of {low} or more" if high is None else f"in {low}..{high}"
        raise UsageError(f"{strategy}(): {argument} is {value!r}; write a whole number {wanted}")
