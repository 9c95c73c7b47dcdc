"""Metadata of workers whose drafter reads the outputs of some layers of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.portable.speculative.interface import SpecMetadata


def default_layers_to_capture(num_layers: int) -> tuple[int, ...]:
    """The early, the middle and the late layer that Eagle3 reads of a target; its only layer if there is but one.

    Raises ``ValueError`` for fewer than 6 layers, one apart. Of 6 layers the middle one is the late one too.
    """
    if num_layers == 1:
        return (0,)
    if num_layers <= 5:
        raise ValueError(f"{num_layers} layers are too few for an early, a middle and a late one; name the layers")
    return 1, num_layers // 2 - 1, num_layers - 4


@dataclass(kw_only=True, eq=False)
class CapturingSpecMetadata(SpecMetadata):
    """Adds the captured hidden states: int64 [max_num_tokens, hidden_size * layers], device, a column group per layer.

    layers_to_capture   layer ids, sorted when made; None for ``default_layers_to_capture`` of ``num_layers``
    num_capture_tokens  rows of the step to capture
    """

    hidden_size: int
    num_layers: int = 0
    layers_to_capture: Sequence[int] | None = None
    num_capture_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.layers_to_capture
        self.layers_to_capture = default_layers_to_capture(self.num_layers) if given is None else tuple(sorted(given))
        width = self.hidden_size * len(self.layers_to_capture)
        self.hidden_states = torch.zeros(self.max_num_tokens, width, dtype=torch.int64, device=self.device)

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step."""
        super().prepare()
        self.num_capture_tokens = self.num_tokens

    def is_layer_capture(self, layer_id: int) -> bool:
        """Whether the drafter reads this layer's output."""
        assert self.layers_to_capture is not None
        return layer_id in self.layers_to_capture

    def maybe_capture_hidden_states(self, layer_id: int, hidden_states: Tensor) -> None:
        """Copy the output of a layer into its columns, one row per token of the step; nothing for another layer.

        Raises ``RuntimeError`` when the buffer or ``hidden_states`` has fewer rows than that.
        """
        assert self.layers_to_capture is not None
        if layer_id not in self.layers_to_capture:
            return
        count = self.num_capture_tokens
        if count > min(len(self.hidden_states), len(hidden_states)):
            raise RuntimeError(
                f"layer {layer_id}: {count} rows are to be captured of {len(hidden_states)}, "
                f"into a buffer of {len(self.hidden_states)}"
            )
        start = self.layers_to_capture.index(layer_id) * self.hidden_size
        self.hidden_states[:count, start : start + self.hidden_size].copy_(hidden_states[:count])
