"""Gives each running request a slot, for state that is kept per request."""

from __future__ import annotations

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import SlotManager


class SeqSlotManager:
    """A request owns its slot from its first step to its end, in the batch or not. Dummies get none."""

    def __init__(self, max_num_sequences: int) -> None:
        self.slot_manager = SlotManager(max_num_sequences)

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Give each request of the batch a slot."""
        for request in scheduled_batch.all_requests():
            if not request.is_dummy:
                self.slot_manager.add_slot(request.py_request_id)

    def free_resources(self, request: LlmRequest) -> None:
        """Take the slot of a request back; does nothing when it has none."""
        self.slot_manager.remove_slot(request.py_request_id)
