"""``Buffers``: storage that the metadata of all graphs shares, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class _Block:
    storage: Tensor
    is_reserved: bool


class Buffers:
    """Blocks of bytes by name. Those that a captured graph knows are reserved, and never freed.

    Whoever asks for a name gets the storage of the one before: graphs of one pool overwrite each other's buffers,
    and what is in them belongs to the one that was prepared last. A block is zeroed when it is new, not again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[str, list[_Block]] = {}

    def get_buffer(
        self, tensor_shape: Sequence[int], dtype: torch.dtype, buffer_name: str, reserve_buffer: bool
    ) -> Tensor:
        """A tensor at the start of a block of that name: the smallest that is large enough, reserved ones first.

        Unless ``reserve_buffer`` is set, and where there is none, blocks that are not reserved give way to a new one.
        """
        size = math.prod(tensor_shape) * dtype.itemsize
        blocks = self.buffers.setdefault(buffer_name, [])
        fitting = [block for block in blocks if block.storage.numel() >= size] if reserve_buffer else []
        block = min(fitting, key=lambda b: (not b.is_reserved, b.storage.numel()), default=None)
        if block is None:
            block = _Block(torch.zeros(size, dtype=torch.uint8, device=self.device), reserve_buffer)
            self.buffers[buffer_name] = [*(b for b in blocks if b.is_reserved), block]
        block.is_reserved |= reserve_buffer
        return block.storage[:size].view(dtype).view(*tensor_shape)
