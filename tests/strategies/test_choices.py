"""The primitives: even, exact, one draw per choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from strategies.choices import arrangement, choose, digits, pick

many = settings(max_examples=600, phases=[Phase.generate], derandomize=True, database=None)


class Feed:
    """A ``draw`` that returns the given values and knows how many were asked for."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.values.pop(0)


@st.composite
def picks(draw: st.DrawFn, options: int) -> int:
    return pick(draw, options)


@pytest.mark.parametrize("options", [2, 7, 60])
def test_every_option_is_picked(options: int) -> None:
    seen = set()

    @many
    @given(picks(options))
    def look(index: int) -> None:
        seen.add(index)

    look()
    assert seen == set(range(options))


def test_a_pick_among_many_reaches_both_ends_and_stays_inside() -> None:
    seen = Counter[int]()

    @many
    @given(picks(1000))
    def look(index: int) -> None:
        assert 0 <= index < 1000
        seen[index // 250] += 1

    look()
    assert set(seen) == {0, 1, 2, 3}
    assert max(seen.values()) < 3 * min(seen.values())


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        (1, [], 0),
        (0, [], 0),
        (256, [255], 255),
        (257, [1], 256),
        (257, [0, 255], 255),
        (1000, [3, 231], 999),
    ],
)
def test_a_pick_uses_no_more_draws_than_it_needs(options: int, values: list[int], expected: int) -> None:
    feed = Feed(*values)
    assert pick(feed, options) == expected
    assert not feed.values


def test_digits_of_one_draw() -> None:
    assert digits(Feed(0), (2, 3, 4)) == [0, 0, 0]
    assert digits(Feed(23), (2, 3, 4)) == [1, 2, 3]
    assert digits(Feed(1), (2, 3, 4)) == [0, 0, 1]


def test_digits_of_many_rows_come_from_one_draw_of_bytes() -> None:
    assert digits(Feed(bytes([0, 1, 7, 8, 255])), (8,) * 5) == [0, 1, 7, 0, 7]


@pytest.mark.parametrize(("items", "size"), [("abc", 2), ("abc", 3), ("a", 1), ("abcdefgh", 8)])
def test_every_arrangement_is_made_of_the_items(items: Sequence[str], size: int) -> None:
    @st.composite
    def arrangements(draw: st.DrawFn) -> list[str]:
        return arrangement(draw, items, size)

    seen = set()

    @settings(many, max_examples=200)
    @given(arrangements())
    def look(found: list[str]) -> None:
        assert len(found) == len(set(found)) == size
        assert set(found) <= set(items)
        seen.add("".join(found))

    look()
    possible = 1
    for i in range(size):
        possible *= len(items) - i
    assert len(seen) >= min(possible, 50)


def test_the_simplest_arrangement_is_the_order_there_is() -> None:
    assert arrangement(Feed(0), "abc", 2) == ["a", "b"]
    assert arrangement(Feed(), "abc", 0) == []


def test_the_first_entry_is_the_simplest() -> None:
    assert choose(Feed(0), "xyz") == "x"
    assert choose(Feed(2), "xyz") == "z"
