"""Reading an engine that may be broken: what cannot be read is itself observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engines.portable.observation import Observer
from engines.portable.pyexecutor.py_executor import is_cuda_error


class Legible:
    """Reads what an observer reads; where that raises, the trace has a sub-step ``unreadable`` that says why.

    A defect may leave a tensor out or make it too short, and it is then found as any other. CUDA errors are raised
    still: a kernel of the engine has failed, and the executor is to be told.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __getattr__(self, name: str) -> Callable[..., None]:
        read = getattr(self._observer, name)

        def try_to_read(*args: Any) -> None:
            try:
                read(*args)
            except Exception as error:
                if is_cuda_error(error):
                    raise
                self._observer.unreadable(name, error)

        return try_to_read
