"""TRT-85: where the device path handles one row per request only, a host loop finds the pages, also under capture."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, PARD, Patch, bug


@bug(
    "TRT-85",
    kind="K10",
    workers=(EAGLE3, PARD),
    title="A replayed graph reads and writes the pages of its capture",
    reference="TensorRT-LLM #17110",
    caught_by=("replay-equals-eager", "kv-content-equals-reference"),
)
def pages_of_the_capture(patch: Patch) -> None:
    import torch

    from engines.portable.models import TracerModel

    place = TracerModel._place

    def _place(self: Any, attn_metadata: Any, num_rows: int) -> Any:
        table, rows = place(self, attn_metadata, num_rows)
        if attn_metadata.num_tokens > attn_metadata.num_seqs:
            by_host = torch.zeros_like(attn_metadata.kv_cache_block_offsets)
            attn_metadata.kv_cache_manager.copy_batch_block_offsets(by_host, attn_metadata.request_ids)
            table = by_host[0, : attn_metadata.num_seqs, 0]
        return table, rows

    patch(TracerModel, "_place", _place)


@bug(
    "TRT-85",
    kind="K10",
    workers=(EAGLE3_TREE,),
    variant="slots",
    title="A replayed graph verifies and stores the trees of the slots of its capture",
    reference="TensorRT-LLM #17110",
    caught_by=("replay-equals-eager", "acceptance-equals-reference"),
)
def slots_of_the_capture(patch: Patch) -> None:
    from engines.portable.speculative.spec_tree_manager import SpecTreeManager

    prepare = SpecTreeManager.prepare_resources

    def prepare_resources(self: Any, scheduled_batch: Any) -> None:
        self.slot_storage.all_ids_buf = self.slot_storage.all_ids_buf.clone()
        prepare(self, scheduled_batch)

    patch(SpecTreeManager, "prepare_resources", prepare_resources)
