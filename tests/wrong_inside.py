"""A defect that nobody can see but from inside a graph: a length that is wrong during a draft call and reads right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from engines.portable._utils import is_current_stream_capturing
from engines.portable.speculative.eagle3 import Eagle3OneModelWorker

WORKER = "Eagle3OneModelWorker"
ROW = 2
"""Row of the batch whose KV length is one too long in ``draft[1]``."""


@contextmanager
def wrong_inside() -> Iterator[None]:
    """Seed it: what kernels derive from the lengths is made before, and the length is put back behind the call."""
    original = Eagle3OneModelWorker._forward_draft_model

    def wrong(
        self: Eagle3OneModelWorker, model: Any, inputs: Any, attn: Any, spec: Any, draft_step: int
    ) -> tuple[Tensor, Tensor]:
        if draft_step != 1 or not is_current_stream_capturing():
            return original(self, model, inputs, attn, spec, draft_step)
        attn.mla_scheduler_buffers()
        attn.kv_lens_cuda[ROW].add_(1)
        result = original(self, model, inputs, attn, spec, draft_step)
        attn.kv_lens_cuda[ROW].sub_(1)
        return result

    with mock.patch.object(Eagle3OneModelWorker, "_forward_draft_model", wrong):
        yield
