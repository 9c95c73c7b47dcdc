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
    from engines.portable.pyexecutor.resource_manager import SlotManager

    def get_slot(self: Any, request_id: int) -> int | None:
        return self.slot_mapping.get(request_id) or None

    patch(SlotManager, "get_slot", get_slot)


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

    prepare = SeqSlotManager.prepare_resources

    def prepare_resources(self: Any, scheduled_batch: Any) -> None:
        present = {request.py_request_id for request in scheduled_batch.all_requests()}
        for request_id in set(self.slot_manager.slot_mapping) - present:
            self.slot_manager.remove_slot(request_id)
        prepare(self, scheduled_batch)

    patch(SeqSlotManager, "prepare_resources", prepare_resources)
