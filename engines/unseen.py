"""Functions that stand for kernels of a model: no torch function mode sees what they call, a graph has each as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Kernels:
    """``record``, while a graph is recorded that is emulated: runs a kernel and notes it. None at other times."""

    record: ClassVar[Callable[[Callable[[], Any]], Any] | None] = None


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Make a kernel of a function: what it does depends on its arguments alone, tensors and what holds some."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if Kernels.record is not None:
            result: T = Kernels.record(partial(function, *args, **kwargs))
            return result
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
