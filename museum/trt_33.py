"""TRT-33: a copy of only those columns of the block table that the host's KV lengths reach, to save time."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-33",
    kind="K3",
    workers=(EAGLE3,),
    title="The block table ends at the host's KV lengths, and drafting goes past them",
    reference="TensorRT-LLM #16313",
    caught_by=("tables-name-owned-pages",),
)
def staging_capped(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare_buffers = TrtllmAttentionMetadata.prepare

    def prepare(self: Any) -> None:
        stale = self.kv_cache_block_offsets.clone()
        prepare_buffers(self)
        for row, kv_len in enumerate(self.kv_lens_runtime.tolist()):
            columns = -(-kv_len // self.kv_cache_manager.tokens_per_block)
            self.kv_cache_block_offsets[:, row, :, columns:] = stale[:, row, :, columns:]

    patch(TrtllmAttentionMetadata, "prepare", prepare)
