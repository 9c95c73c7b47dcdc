"""SGL-04: the page tables of graphs are as wide as the longest context, and drafts are verified beyond it."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "SGL-04",
    kind="K4",
    workers=(EAGLE3, PARD),
    title="The table of a graph has no column for pages that drafts near max_seq_len are granted",
    reference="SGLang #29695, #19641",
    caught_by=("tables-name-owned-pages",),
)
def graph_table_too_narrow(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare = TrtllmAttentionMetadata.prepare

    def prepare_narrow(self: Any) -> None:
        prepare(self)
        if self.is_cuda_graph:
            manager = self.kv_cache_manager
            # What longer requests have there is what the table was made with.
            self.kv_cache_block_offsets[..., manager._blocks(manager.max_seq_len) :] = 0

    patch(TrtllmAttentionMetadata, "prepare", prepare_narrow)
