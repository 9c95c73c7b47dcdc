"""TRT-85: where the device path handles one row per request only, a host loop finds the pages, also under capture."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, MTP, PARD, Patch, baked, bug

_REFERENCE = "TensorRT-LLM #17110"


@bug(
    "TRT-85",
    kind="K10",
    workers=(EAGLE3, PARD),
    title="A replayed graph reads and writes the pages of its capture",
    reference=_REFERENCE,
    caught_by=("replay-equals-eager", "kv-content-equals-reference"),
)
def pages_of_the_capture(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttention

    find = TrtllmAttention.place

    def place(self: Any, attn_metadata: Any, num_rows: int) -> Any:
        table, rows = find(self, attn_metadata, num_rows)
        if attn_metadata.num_tokens > attn_metadata.num_seqs:
            by_host = attn_metadata.kv_cache_manager.get_block_table(attn_metadata.request_ids)
            table = baked(by_host.flatten().tolist(), attn_metadata.device).to(table.dtype).view(by_host.shape)
        return table, rows

    patch(TrtllmAttention, "place", place)


@bug(
    "TRT-85",
    kind="K10",
    workers=(MTP,),
    variant="slots",
    title="A replayed graph reads and writes the history in the slots of its capture",
    reference=_REFERENCE,
    caught_by=("replay-equals-eager", "pools-match-history", "history-equals-reference"),
)
def slots_of_the_capture(patch: Patch) -> None:
    from copy import copy

    from engines.portable.speculative.mtp import MTPWorker

    def by_host(method: Any) -> Any:
        def with_slots(self: Any, *args: Any) -> Any:
            attn_metadata, found = args[-2], copy(args[-1])
            slots = found.mtp_hidden_states_manager.slot_manager.get_slots(found.request_ids)
            found.slot_ids = baked(slots, attn_metadata.device)
            return method(self, *args[:-1], found)

        return with_slots

    for name in ("update_mtp_hidden_states", "prepare_drafter_inputs"):
        patch(MTPWorker, name, by_host(getattr(MTPWorker, name)))


@bug(
    "TRT-85",
    kind="K10",
    workers=(EAGLE3_TREE,),
    variant="slots",
    title="A replayed graph verifies and stores the trees of the slots of its capture",
    reference=_REFERENCE,
    caught_by=("replay-equals-eager", "acceptance-equals-reference"),
)
def tree_slots_of_the_capture(patch: Patch) -> None:
    from engines.portable.speculative.spec_tree_manager import SpecTreeManager

    prepare = SpecTreeManager.prepare_resources

    def prepare_resources(self: Any, scheduled_batch: Any) -> None:
        self.slot_storage.all_ids_buf = self.slot_storage.all_ids_buf.clone()
        prepare(self, scheduled_batch)

    patch(SpecTreeManager, "prepare_resources", prepare_resources)
