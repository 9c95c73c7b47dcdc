"""Draws that depend on the seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis.internal.conjecture import providers


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
    with mock.patch.multiple(providers, _get_local_constants=Constants, CONSTANTS_CACHE=cache):
        yield
