"""CUDA graphs where there is no CUDA: the tensor operations of a region are recorded and run again.

As with a CUDA graph, a replay runs none of the region's Python: values read on the host, branches taken and
attributes assigned stay as they were at capture, and every operation reads and writes the very tensors of the
capture. Unlike with a CUDA graph, the operations are executed while they are recorded too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from engines.unseen import Kernels

Operation = Callable[[], object]
_Call = Callable[[], Operation | None]
"""What was recorded of an operation or a kernel: makes of it what a replay runs, if that is anything."""


class Graph(Protocol):
    """What the graph runner needs of a graph; ``torch.cuda.CUDAGraph`` is one."""

    def replay(self) -> None:
        """Run the recorded work again, on the same tensors."""
        ...


class CpuGraph:
    """A recorded sequence of tensor operations. Their intermediate results stay alive with it, as in a graph pool.

    ``replayable`` False: nothing is recorded, which costs more than the operations do.
    """

    recording: ClassVar[bool] = False
    """Whether a capture is under way; captures do not nest."""

    def __init__(self, *, replayable: bool = True) -> None:
        self._replayable = replayable
        self._calls: list[_Call] = []
        self._operations: list[Operation] | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what runs inside."""
        CpuGraph.recording = True
        try:
            with _recorded(self._calls) if self._replayable else nullcontext():
                yield
        finally:
            CpuGraph.recording = False

    def replay(self) -> None:
        """Run the recorded operations again, out of sight of torch function modes, as kernels of a graph would."""
        assert self._replayable, "this graph was captured as one that nobody replays"
        with torch._C.DisableTorchFunction():
            if self._operations is None:
                # Not while recording: many graphs are never replayed.
                self._operations = [operation for call in self._calls if (operation := call()) is not None]
            for operation in self._operations:
                operation()


def unrecorded(listener: Callable[..., None] | None) -> Callable[..., None] | None:
    """Keep what a listener reads in a region out of the graph that is made of it. None stands for no listener."""
    if listener is None:
        return None

    def listen(*args: Any) -> None:
        with torch._C._DisableTorchDispatch():
            listener(*args)

    return listen


class _Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled, and keeping torch's compiler off costs the seconds of importing it.
        return False

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What an overload calls itself: there are hundreds of operations in a graph.
        result = func._op(*args, **kwargs)
        self._calls.append(partial(_operation, func, args, kwargs, result))
        return result


@contextmanager
def _recorded(calls: list[_Call]) -> Iterator[None]:
    """Note what runs inside."""

    def record(kernel: Callable[[], Any]) -> Any:
        Kernels.record = None
        try:
            # Without the recorder, and with what else watches operations.
            with torch._C.DisableTorchFunction(), _pop_mode_temporarily():
                result = kernel()
        finally:
            Kernels.record = record
        calls.append(partial(_kernel, kernel, result))
        return result

    Kernels.record = record
    try:
        with _Recorder(calls):
            yield
    finally:
        Kernels.record = None


def _kernel(run: Callable[[], Any], result: Any) -> Operation:
    """How to run a kernel again so that the tensors that it made have what it makes then."""
    outputs = [*_made(result)]

    def again() -> None:
        for output, value in zip(outputs, _made(run()), strict=True):
            output.copy_(value)

    return again


def _made(result: Any) -> Iterator[Tensor]:
    """The tensors in what a kernel returns: itself, or in tuples and dataclasses."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _made(part)
    elif is_dataclass(result):
        for field in fields(result):
            yield from _made(getattr(result, field.name))
    else:
        assert result is None, f"a kernel returns a {type(result).__name__}, which a replay could not write to"


def _operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation | None:
    """How to run a call again so that it has its effect on the tensors of the capture; None if it has none."""
    call = partial(func._op, *args, **kwargs)
    if _writes(func):
        return call
    given = {_storage(tensor) for tensor in _tensors((*args, *kwargs.values()))}
    # A view needs nothing: the other operations keep its storage up to date. A number read on the host stays.
    if isinstance(result, Tensor):
        return None if _storage(result) in given else lambda: result.copy_(call())
    if not isinstance(result, tuple) or any(_storage(output) in given for output in result):
        return None

    def again() -> None:
        for output, value in zip(result, call(), strict=True):
            output.copy_(value)

    return again


@cache
def _writes(func: Any) -> bool:
    return any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, which nest at most in lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from freeing an earlier session's graph now, which would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(
    forward: Callable[[], Any], device: torch.device, pool: Any = None, *, replayable: bool = True
) -> tuple[Graph, Any]:
    """Record ``forward`` and let it take effect once; returns the graph and the tensors that it writes.

    ``replayable`` False spares the recording where graphs are emulated.
    On CUDA capturing executes nothing, so the new graph is replayed once, as upstream does.
    """
    if device.type != "cuda":
        emulated = CpuGraph(replayable=replayable)
        with emulated.capture():
            outputs = forward()
        return emulated, outputs
    graph = torch.cuda.CUDAGraph()
    with _no_garbage_collection(), torch.cuda.graph(graph, pool=pool):
        outputs = forward()
    graph.replay()
    return graph, outputs
