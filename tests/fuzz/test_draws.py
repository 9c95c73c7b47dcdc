"""What the search draws does not depend on which modules are loaded, nor on what it has drawn before."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine, providers

from fuzz.draws import each_anew, from_the_seed_alone


def drawn() -> list[list[int]]:
    values: list[list[int]] = []

    @seed(1)
    @settings(max_examples=200, database=None, derandomize=False, phases=(Phase.generate,))
    @given(st.lists(st.integers(0, 255), min_size=5))
    def case(value: list[int]) -> None:
        values.append(value)

    case()
    return values


def load_constants(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a module with constants that nothing else has."""
    path.write_text("VALUES = (151, 157, 163, 167, 173, 179, 181, 191, 193, 197)\n")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, path.stem, module)


@pytest.mark.exhaustive
def test_only_the_seed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with from_the_seed_alone():
        before = drawn()
    otherwise = drawn()
    load_constants(tmp_path / "colours.py", monkeypatch)
    with from_the_seed_alone():
        assert drawn() == before
    assert drawn() != otherwise, "Hypothesis has changed its ways, and the module under test may go"


def test_a_hypothesis_without_that_habit_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(providers, "_get_local_constants")
    cache = providers.CONSTANTS_CACHE
    with from_the_seed_alone():
        assert cache is providers.CONSTANTS_CACHE


def repeated() -> int:
    """How many of the drawn lists share five numbers or more with the one before."""
    lists = drawn()
    return sum(len(set(a) & set(b)) >= 5 for a, b in pairwise(lists))


@pytest.mark.exhaustive
def test_no_example_is_a_variant_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated() > 20, "Hypothesis has changed its ways, and each_anew may go"
    with each_anew():
        # Two neighbours may be alike by chance.
        assert repeated() <= 5
    assert repeated() > 20
    monkeypatch.delattr(engine.ConjectureRunner, "generate_mutations_from")
    with each_anew():
        assert not hasattr(engine.ConjectureRunner, "generate_mutations_from")
