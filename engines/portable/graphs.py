"""CUDA graphs where there is no CUDA: the tensor operations of a region are recorded and run again.

As with a CUDA graph, a replay runs none of the region's Python: values read on the host, branches taken and
attributes assigned stay as they were at capture, and every operation reads and writes the very tensors of the
capture. Unlike with a CUDA graph, the operations are executed while they are recorded too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Operation = Callable[[], object]


class Graph(Protocol):
    """What the graph runner needs of a graph; ``torch.cuda.CUDAGraph`` is one."""

    def replay(self) -> None:
        """Run the recorded work again, on the same tensors."""
        ...


class CpuGraph:
    """A recorded sequence of tensor operations. Their intermediate results stay alive with it, as in a graph pool."""

    recording: ClassVar[bool] = False
    """Whether a capture is under way; captures do not nest."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what runs inside."""
        CpuGraph.recording = True
        try:
            with _Recorder(self._operations):
                yield
        finally:
            CpuGraph.recording = False

    def replay(self) -> None:
        """Run the recorded operations again, out of sight of torch function modes, as kernels of a graph would."""
        with torch._C.DisableTorchFunction():
            for operation in self._operations:
                operation()


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = _operation(func, args, kwargs, result)
        if operation is not None:
            self._operations.append(operation)
        return result


def _operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation | None:
    """How to run a call again so that it has its effect on the tensors of the capture; None if it has none."""
    aliases = [r.alias_info for r in func._schema.returns]
    if any(a is not None and a.is_write for a in aliases):
        return lambda: func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        # A view is of storage that the other operations keep up to date.
        return None if aliases[0] is not None else lambda: result.copy_(func(*args, **kwargs))
    if not isinstance(result, tuple):
        # A number read on the host.
        return None

    def again() -> None:
        for output, value in zip(result, func(*args, **kwargs), strict=True):
            output.copy_(value)

    return None if any(a is not None for a in aliases) else again


def capture(forward: Callable[[], Any], device: torch.device, pool: Any = None) -> tuple[Graph, Any]:
    """Record ``forward`` and let it take effect once; returns the graph and the tensors that it writes.

    On CUDA capturing executes nothing, so the new graph is replayed once, as upstream does.
    """
    if device.type != "cuda":
        emulated = CpuGraph()
        with emulated.capture():
            outputs = forward()
        return emulated, outputs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = forward()
    graph.replay()
    return graph, outputs
