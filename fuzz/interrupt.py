"""Ctrl-C and SIGTERM: an exception where the program is, and a note, as Python drops exceptions in some places.

One that strikes in a callback of the garbage collector, as Hypothesis installs one, or in a ``__del__`` is printed
and forgotten. So whoever may be in such a place before each of its runs asks ``check``.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_struck: list[int] = []
"""Signals that came since the block began."""


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block, which belongs to the main thread, both signals raise ``KeyboardInterrupt``."""
    _struck.clear()
    before = [(number, signal.signal(number, _strike)) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        _struck.clear()


def check() -> None:
    """Raise ``KeyboardInterrupt`` if a signal has come, whatever has become of its own exception."""
    if _struck:
        raise KeyboardInterrupt


def _strike(number: int, frame: Any) -> None:
    _struck.append(number)
    raise KeyboardInterrupt
