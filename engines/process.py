"""Process-wide state that is changed for a while and then put back."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let attribute ``name`` of ``owner`` be ``value`` while inside."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def take_out(roots: Collection[str]) -> dict[str, ModuleType]:
    """Remove the packages ``roots``, with all below them, from ``sys.modules`` and return them by name."""
    if not any(root in sys.modules for root in roots):
        return {}
    names = [name for name in sys.modules if name.partition(".")[0] in roots]
    return {name: sys.modules.pop(name) for name in names}
