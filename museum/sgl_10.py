"""SGL-10: a buffer grows when a batch needs more of it, and graphs go on reading the one that it replaced."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "SGL-10",
    kind="K10",
    workers=(EAGLE3, PARD),
    title="The block table is allocated anew for a longer request, and a captured graph reads the old one",
    reference="SGLang #38512",
    caught_by=("graph-buffers-stable", "replay-equals-eager"),
)
def table_grows(patch: Patch) -> None:
    import torch

    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare_buffers = TrtllmAttentionMetadata.prepare

    def prepare(self: Any) -> None:
        pages = max(len(self.kv_cache_manager.get_block_ids(id)) for id in self.request_ids)
        if pages > getattr(self, "most_pages", 0):
            self.most_pages = pages
            self.kv_cache_block_offsets = torch.zeros_like(self.kv_cache_block_offsets)
        prepare_buffers(self)

    patch(TrtllmAttentionMetadata, "prepare", prepare)
