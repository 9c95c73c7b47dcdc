"""What the last rank of a pipeline tells the others: the outputs of its worker, which they have not run."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from torch import Tensor

from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

OWN: Final = frozenset({"logits"})
"""Outputs that a rank keeps to itself."""


class PPRelay:
    """Hands the outputs of one forward after the other from the last rank to another one, as copies."""

    def __init__(self) -> None:
        self._sent: deque[dict[str, Tensor]] = deque()

    def send(self, outputs: dict[str, Tensor]) -> None:
        """What the last rank returned; it may write into these tensors again before they are read."""
        self._sent.append({name: output.clone() for name, output in outputs.items() if name not in OWN})

    def receive(self, placeholders: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of another rank, whose own have the right form and any content."""
        return {**placeholders, **self._sent.popleft()}

    def connect(self, last: PyTorchModelEngine, other: PyTorchModelEngine) -> None:
        """Let one engine send what its forwards return, and another one receive it in place of its own."""
        sender: Any = last
        receiver: Any = other
        worker = receiver.model.spec_worker
        worker.forward = worker.skip_forward
        forward, placeholders = sender.forward, receiver.forward

        def sending(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            outputs: dict[str, Tensor] = forward(*args, **kwargs)
            self.send(outputs)
            return outputs

        def receiving(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            return self.receive(placeholders(*args, **kwargs))

        sender.forward, receiver.forward = sending, receiving
