"""What the observer reads of a drafter with a context of its own (DFlash, DSpark)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from engines.portable.cache_observation import Committed
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager


class DraftContext(Protocol):
    """Reads the contexts that a worker keeps, wherever it keeps them."""

    def lengths(self, attn: Any, spec: Any) -> dict[str, list[int]]:
        """Columns of each generation's context."""
        ...

    def draft_inputs(self, kwargs: Mapping[str, Any]) -> dict[str, list[int]]:
        """Inputs of the draft call."""
        ...

    def content(self, requests: Iterable[Committed]) -> dict[str, dict[int, list[list[int]]]]:
        """Position and value of each committed column of each request."""
        ...


class ContextObserver:
    """Reads the worker's context buffers, by row of the batch and by request."""

    def __init__(self, worker: Any, slots: SeqSlotManager) -> None:
        self._worker = worker
        self._slots = slots

    def lengths(self, attn: Any, spec: Any) -> dict[str, list[int]]:
        """Columns of each generation's context. The map from rows to slots outlives requests that fail."""
        slots = spec.batch_to_slot[attn.num_contexts : attn.num_seqs]
        return {"ctx_len": self._worker._ctx_len[slots].tolist()}

    def draft_inputs(self, kwargs: Mapping[str, Any]) -> dict[str, list[int]]:
        """Inputs of the draft call."""
        return {
            "input_ids": kwargs["noise_embedding"].flatten().tolist(),
            "position_ids": kwargs["query_positions"].flatten().tolist(),
            "num_ctx_per_req": kwargs["num_ctx_per_req"].tolist(),
        }

    def content(self, requests: Iterable[Committed]) -> dict[str, dict[int, list[list[int]]]]:
        """Position and value of each committed column of each request."""
        lens = {request.py_request_id: request.num_cached_tokens for request in requests}
        rows = zip(lens.items(), self._slots.get_slots(list(lens)))
        columns = torch.stack([self._worker._ctx_k_buf, self._worker._ctx_v_buf], dim=2)
        return {"draft_context": {request: columns[slot, :count].tolist() for (request, count), slot in rows}}
