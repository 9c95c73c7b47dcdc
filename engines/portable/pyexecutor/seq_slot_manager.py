"""Gives each running request a slot, for state that a worker keeps per request."""

from __future__ import annotations

from collections.abc import Sequence

from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import SpecResourceManager


class SeqSlotManager(SpecResourceManager):
    """A request owns its slot from its first step to its end; dummies share ``dummy_slot``, behind all others."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.dummy_slot = num_slots

    def add_dummy_requests(self, requests: Sequence[LlmRequest]) -> None:
        """Nothing is kept for dummies, but the texts of suffix automata."""
        if self.sa_manager is not None:
            self.sa_manager.add_dummy_requests(requests)

    def get_slots(self, request_ids: Sequence[int]) -> list[int]:
        """Slots of the rows of a batch."""
        slots = [self.slot_manager.get_slot(request_id) for request_id in request_ids]
        return [self.dummy_slot if slot is None else slot for slot in slots]

    def _add_slot(self, request: LlmRequest) -> int:
        return self.dummy_slot if request.is_dummy else super()._add_slot(request)
