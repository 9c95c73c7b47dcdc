"""The exceptions that the suite raises in the code under test.

Each derives from the real class, so that the code under test treats it as real, and from ``InjectedFault``, so
that the suite never takes a real one for its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from traceback import walk_tb
from types import CodeType
from typing import Any

from scenarios import Fault, FaultKind

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ILLEGAL_ADDRESS = 700
_TEXTS = {
    FaultKind.OOM: "CUDA out of memory.",
    FaultKind.CUDA: "CUDA error: an illegal memory access was encountered",
    FaultKind.ERROR: "injected error",
}


class InjectedFault(Exception):
    """Raised by the suite, never by the code under test.

    site, occurrence, kind  of the ``Fault`` that was planned
    """

    site: str
    occurrence: int
    kind: FaultKind


def is_injected(error: BaseException | None) -> bool:
    """Whether the suite raised ``error``; an exception that merely has one as its cause does not count."""
    return isinstance(error, InjectedFault)


def make(fault: Fault) -> InjectedFault:
    """The exception of a fault, a new one each time.

    oom    a ``torch.OutOfMemoryError``
    cuda   a ``torch.AcceleratorError`` whose text starts with "CUDA error"
    error  a ``RuntimeError``

    Without torch all three are plain ``RuntimeError``, the base that torch's classes share.
    """
    error = _class(fault.kind)(f"{_TEXTS[fault.kind]} (injected at {fault})")
    error.site, error.occurrence, error.kind = fault.site, fault.occurrence, fault.kind
    return error


@cache
def _class(kind: FaultKind) -> Callable[[str], InjectedFault]:
    name = {FaultKind.OOM: "OutOfMemoryError", FaultKind.CUDA: "AcceleratorError"}.get(kind, "")
    namespace: dict[str, Any] = {"__module__": __name__}
    if kind is FaultKind.CUDA:
        namespace["error_code"] = _ILLEGAL_ADDRESS
    return type(f"Injected{name or 'Error'}", (InjectedFault, _real(name)), namespace)


def _real(name: str) -> type[RuntimeError]:
    try:
        import torch
    except ImportError:
        return RuntimeError
    return getattr(torch, name, RuntimeError)


def raised_at(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame of ``error`` outside this package, None if it was never raised there.

    Frames of torch, and of modes that look at its calls, are passed over if there is any other: a module's forward is
    called by ``torch.nn``, and who called the module is what a reader wants. The path is relative to the current
    directory when the file lies under it.
    """
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    frames = [place for place in frames if not place[0].co_filename.startswith(_PACKAGE)]
    if not frames:
        return None
    code, line = next((place for place in reversed(frames) if not _is_torch(place[0])), frames[-1])
    path = code.co_filename
    return f"{path.removeprefix(os.getcwd() + os.sep)}:{line}"


def _is_torch(code: CodeType) -> bool:
    file = getattr(sys.modules.get("torch"), "__file__", None)
    inside = file is not None and code.co_filename.startswith(os.path.dirname(file) + os.sep)
    return inside or code.co_name == "__torch_function__"
