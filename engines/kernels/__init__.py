"""Kernels of the portable engine that exist twice: as torch operations, and written in Triton for one launch each.

Whoever calls one asks ``triton_for(tensor)`` and runs the torch operations where that is None. Both give the same
bits. ``using`` says which are used; outside of it they are torch's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final

from torch import Tensor

from scenarios import UsageError

NAMES: Final = ("torch", "triton")
ENVIRONMENT: Final = "SPECFUZZ_KERNELS"
"""Names one of ``NAMES`` for sessions on a CUDA device, instead of Triton's where it is installed."""

_chosen = "torch"


def triton_missing() -> str | None:
    """Why there are no Triton kernels here, None where there are."""
    return None if find_spec("triton") is not None else "triton is not installed"


def default(device_type: str) -> str:
    """The kernels of a session on such a device: Triton's on CUDA where it is installed, else torch's.

    Raises ``UsageError`` when the environment asks for what there is not.
    """
    if device_type != "cuda":
        return "torch"
    name = os.environ.get(ENVIRONMENT)
    if name is None:
        return "torch" if triton_missing() else "triton"
    if name not in NAMES:
        raise UsageError(f"{ENVIRONMENT}: {name!r} is not known; write 'torch' or 'triton'")
    if name == "triton" and (missing := triton_missing()):
        raise UsageError(f"{ENVIRONMENT}: {missing}; install it, or write 'torch'")
    return name


@contextmanager
def using(name: str) -> Iterator[None]:
    """In the block, kernels are those of ``name``, one of ``NAMES``."""
    global _chosen
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def triton_for(tensor: Tensor) -> ModuleType | None:
    """The module of the Triton kernels if ``tensor`` is to be worked on by them, else None.

    On the CPU they run only where Triton interprets them.
    """
    if _chosen != "triton":
        return None
    kernels = _load()
    return kernels if tensor.is_cuda or kernels.INTERPRETED else None


def warm_up(device_type: str) -> None:
    """Compile the Triton kernels now, once in a process: while a graph is captured nothing can be loaded."""
    if device_type == "cuda":
        _load().warm_up(device_type)


@cache
def _load() -> ModuleType:
    return import_module("engines.kernels.triton_kernels")
