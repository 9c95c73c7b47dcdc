"""Functions that stand for kernels of a model.

Torch function modes, and with them fault sites, do not see what these functions call, and an emulated graph records
each of them as one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Kernels:
    """``record`` runs a kernel and notes it, while an emulated graph is recorded; None at other times."""

    record: ClassVar[Callable[[Callable[[], Any]], Any] | None] = None


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Make a kernel of a function whose effect depends on its arguments alone: tensors, and objects that hold some."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if Kernels.record is not None:
            result: T = Kernels.record(partial(function, *args, **kwargs))
            return result
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
