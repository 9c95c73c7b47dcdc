"""Small helpers of the engine, named as upstream names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engines.portable.graphs import CpuGraph


def default_device() -> torch.device:
    """Where the engine's tensors live unless it is told: the CUDA device of this machine, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prefer_pinned(device: torch.device) -> bool:
    """Whether host tensors that are copied to ``device`` should be pinned, so that the copy is asynchronous."""
    return device.type == "cuda"


def maybe_pin_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` in pinned memory where that helps the copy to ``device``, otherwise itself."""
    return tensor.pin_memory() if prefer_pinned(device) else tensor


def host_tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """A new int32 host tensor, ready to be copied to ``device``.

    New each time: a persistent staging buffer would be rewritten by the next step while its copy is still queued
    (PR #15546).
    """
    return torch.tensor(values, dtype=torch.int32, pin_memory=prefer_pinned(device))


def is_graph_warmup(attn_metadata: Any) -> bool:
    """Whether this forward warms a graph up: several of them share one preparation."""
    return bool(attn_metadata.is_cuda_graph) and not is_current_stream_capturing()


def is_current_stream_capturing() -> bool:
    """Whether kernels are being recorded into a graph instead of served, emulated graphs included."""
    return CpuGraph.recording or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
