"""What upstream's workers keep per request: how the executor calls its manager, and how the observer reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from engines.portable.cache_observation import Committed
from engines.portable.context_observation import ContextObserver
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.speculative.mtp import MTPHiddenStatesManager


class HiddenStatesResources(MTPHiddenStatesManager):
    """Upstream's ``MTPHiddenStatesManager``, called and read as the portable engine's."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.slot_manager = manager.slot_manager
        self.mtp_past_tokens_pool = manager.mtp_past_tokens_pool
        self.mtp_past_hidden_states_pool = manager.mtp_past_hidden_states_pool
        self.relaxed_delta_pool = None  # relaxed acceptance is refused

    def add_dummy_requests(self, requests: Sequence[LlmRequest]) -> None:
        """Reserve the slots of dummy generations; contexts get theirs as all contexts do."""
        self.manager.add_dummy_requests([r.request_id for r in requests if not r.is_context])

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Reserve a slot for each request that starts."""
        self.manager.prepare_resources(scheduled_batch)

    def free_resources(self, request: LlmRequest) -> None:
        """Take the slot back."""
        self.manager.free_resources(request)


class WorkerContextObserver(ContextObserver):
    """Reads the contexts of upstream's DFlash worker, which gives out their slots itself.

    Its first forward makes the buffers, one after the other; until they are there, no context has a column.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def lengths(self, attn: Any, spec: Any) -> dict[str, list[int]]:
        """Columns of the context that each generation is led to, its own or not."""
        worker = self._worker
        if worker._ctx_len is None or worker._batch_to_slot is None:
            return {"ctx_len": [0] * attn.num_generations}
        slots = worker._batch_to_slot[attn.num_contexts : attn.num_seqs]
        return {"ctx_len": worker._ctx_len[slots].tolist()}

    def draft_inputs(self, kwargs: Mapping[str, Any]) -> dict[str, list[int]]:
        """Inputs of the draft call."""
        return super().draft_inputs({**kwargs, "noise_embedding": kwargs["noise_embedding"].squeeze(2)})

    def content(self, requests: Iterable[Committed]) -> dict[str, dict[int, list[list[int]]]]:
        """Position and value of each committed column; a request without a slot has none."""
        return {"draft_context": {r.py_request_id: self._columns(r) for r in requests}}

    def _columns(self, request: Committed) -> list[list[int]]:
        worker = self._worker
        slot = worker._req_to_slot.get(request.py_request_id)
        if slot is None:
            return []
        count = min(request.num_cached_tokens, int(worker._ctx_len[slot]))
        keys, values = (buffer[slot, 0, :count, 0, 0] for buffer in (worker._ctx_k_buf, worker._ctx_v_buf))
        columns: list[list[int]] = torch.stack([keys, values], dim=1).tolist()
        return columns
