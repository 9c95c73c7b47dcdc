"""TRT-56: who has which slot: state that is kept per request lies where the map from requests to slots says."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DSPARK, Patch, bug


@bug(
    "TRT-56",
    kind="K5",
    workers=(DFLASH,),
    title="Slot 0 is taken for no slot, and its request is sent to that of the dummies",
    reference="TensorRT-LLM #3991, #5386",
    caught_by=("ctx-len-counts-committed", "draft-context-equals-cache", "drafts-equal-reference"),
)
def falsy_slot(patch: Patch) -> None:
    from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager

    def get_slots(self: Any, request_ids: list[int]) -> list[int]:
        return [self.slot_manager.get_slot(request_id) or self.dummy_slot for request_id in request_ids]

    patch(SeqSlotManager, "get_slots", get_slots)


@bug(
    "TRT-56",
    kind="K6",
    workers=(DFLASH, DSPARK),
    variant="left-out",
    title="A request that one batch leaves out loses its slot, and its context to whoever gets that",
    reference="TensorRT-LLM, no public number",
    caught_by=("ctx-len-counts-committed", "draft-block-follows-context", "drafts-equal-reference"),
)
def slot_of_a_request_left_out(patch: Patch) -> None:
    from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager

    def prepare_resources(self: Any, scheduled_batch: Any) -> None:
        requests = [r for r in scheduled_batch.all_requests() if not r.is_dummy]
        for request_id in getattr(self, "last_batch", set()) - {r.py_request_id for r in requests}:
            self.slot_manager.remove_slot(request_id)
        for request in requests:
            if self.slot_manager.get_slot(request.py_request_id) is None:
                self.slot_manager.add_slot(request.py_request_id)
        self.last_batch = {r.py_request_id for r in requests}

    patch(SeqSlotManager, "prepare_resources", prepare_resources)
