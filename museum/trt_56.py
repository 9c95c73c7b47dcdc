"""TRT-56: who has which slot: state that is kept per request lies where the map from requests to slots says."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DSPARK, EAGLE3, EAGLE3_TREE, MTP, SA, Patch, bug


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


@bug(
    "TRT-56",
    kind="K4",
    workers=(EAGLE3, MTP, SA, EAGLE3_TREE),
    variant="kept",
    title="The slot of a request that ends is not given back",
    reference="TensorRT-LLM #5119",
    caught_by=("slots-belong-to-requests",),
)
def slot_of_a_finished_request(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import SpecResourceManager

    free = SpecResourceManager.free_resources

    def free_resources(self: Any, request: Any) -> None:
        if request.is_dummy:
            free(self, request)

    patch(SpecResourceManager, "free_resources", free_resources)


@bug(
    "TRT-56",
    kind="K2",
    workers=(EAGLE3, DSPARK),
    variant="failed",
    title="A failure ends requests and leaves them their slots",
    reference="TensorRT-LLM, no public number",
    caught_by=("slots-belong-to-requests",),
)
def slots_of_failed_requests(patch: Patch) -> None:
    from engines.portable.pyexecutor.py_executor import PyExecutor
    from engines.process import replaced

    handle_errors = PyExecutor._handle_errors

    def _handle_errors(self: Any, iteration: Any, error: Any) -> Any:
        with replaced(self, "spec_resource_manager", None):
            return handle_errors(self, iteration, error)

    patch(PyExecutor, "_handle_errors", _handle_errors)


@bug(
    "TRT-56",
    kind="K5",
    workers=(EAGLE3, MTP),
    variant="dummies",
    title="Dummies keep their slots after their step",
    reference="TensorRT-LLM #12063",
    caught_by=("slots-belong-to-requests",),
)
def slots_of_dummies(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import SpecResourceManager

    free = SpecResourceManager.free_resources

    def free_resources(self: Any, request: Any) -> None:
        if not request.is_dummy:
            free(self, request)

    def add_slot(self: Any, request: Any) -> int:
        self.slot_manager.remove_slot(request.py_request_id)
        return int(self.slot_manager.add_slot(request.py_request_id))

    patch(SpecResourceManager, "free_resources", free_resources)
    patch(SpecResourceManager, "_add_slot", add_slot)


@bug(
    "TRT-56",
    kind="K6",
    workers=(EAGLE3,),
    variant="stale",
    title="Slots of the rows are those of the last batch that was larger",
    reference="TensorRT-LLM, no public number",
    caught_by=("slots-belong-to-requests",),
)
def slots_of_a_larger_batch(patch: Patch) -> None:
    from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata

    prepare = Eagle3OneModelSpecMetadata.prepare

    def keep(self: Any) -> None:
        before = self.slot_ids.clone()
        prepare(self)
        if len(self.request_ids) < getattr(self, "largest", 0):
            self.slot_ids.copy_(before)
        self.largest = max(len(self.request_ids), getattr(self, "largest", 0))

    patch(Eagle3OneModelSpecMetadata, "prepare", keep)
