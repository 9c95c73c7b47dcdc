"""Draws that depend on the seed alone, each of them anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture import engine, providers

from engines.process import replaced


@contextmanager
def from_the_seed_alone() -> Iterator[None]:
    """In the block, Hypothesis draws no constants that it finds in the modules that happen to be loaded.

    It looks for them in all code but the installed, so equal units would find different things in processes that
    have loaded other modules, and again once the suite is installed. A Hypothesis that does not do so, or that does
    it elsewhere, is left as it is.
    """
    if not hasattr(providers, "_get_local_constants"):
        yield
        return
    from hypothesis.internal.constants_ast import Constants

    cache = type(providers.CONSTANTS_CACHE)(1024)
    with replaced(providers, "_get_local_constants", Constants), replaced(providers, "CONSTANTS_CACHE", cache):
        yield


@contextmanager
def each_anew() -> Iterator[None]:
    """In the block, Hypothesis draws each example for itself.

    Otherwise it lets each be followed by up to five variants that repeat a part of it in another place, in which
    most scenarios are the same as before but for a number. Without them a defect that needs a fault in the right
    place is found within a third to a half of the cases. A Hypothesis that does so elsewhere is left as it is.
    """
    runner = engine.ConjectureRunner
    if not hasattr(runner, "generate_mutations_from"):
        yield
        return

    def make_no_variants(self: Any, data: Any) -> None:
        pass

    with replaced(runner, "generate_mutations_from", make_no_variants):
        yield
