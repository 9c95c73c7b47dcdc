"""Running code that names CUDA where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from engines.portable.graphs import CpuGraph

EMULATED_DEVICE = "cpu (emulated)"

# Looked up once: every torch call under test is compared with them.
_IS_CUDA: Final = torch.Tensor.is_cuda
_CUDA: Final = torch.Tensor.cuda
_PIN_MEMORY: Final = torch.Tensor.pin_memory
_TO: Final = torch.Tensor.to


def is_emulated_stream_capturing() -> bool:
    """What ``torch.cuda.is_current_stream_capturing`` says where graphs are emulated."""
    return CpuGraph.recording


def mem_get_info() -> tuple[int, int]:
    """What ``torch.cuda.mem_get_info`` says without CUDA: free and total bytes, enough that nothing warns."""
    return 1 << 40, 1 << 40


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class CudaOnCpu(TorchFunctionMode):
    """Rewrites device "cuda" to "cpu" in every torch call, makes ``.cuda()`` a copy and turns pinning off.

    A copy, because on a GPU a host tensor and its device twin never share storage. Every tensor says that it is on
    CUDA, as upstream's sparse metadata clamps device tensors where it asserts of host tensors.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__self__", None) is _IS_CUDA:
            return True
        if func is _CUDA:
            return args[0].clone()
        if func is _PIN_MEMORY:
            return args[0]
        if func is _TO and len(args) > 1 and _is_cuda(args[1]):
            return func(args[0], "cpu", *args[2:], **{**(kwargs or {}), "copy": True})
        if not kwargs:
            return func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
            if func is _TO:
                kwargs["copy"] = True
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)
