"""TRT-90: block tables are staged in one buffer, which the next step rewrites while the copy is still queued."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, SA, Patch, bug


@bug(
    "TRT-90",
    kind="K11",
    workers=(EAGLE3, PARD, SA),
    title="Block tables are staged in a buffer that the next step rewrites before its copy has run",
    reference="TensorRT-LLM #15546",
    caught_by=("copies-are-not-overtaken", "stalled-copies-change-nothing"),
)
def one_staging_buffer(patch: Patch) -> None:
    import torch

    from engines.portable._utils import maybe_pin_memory
    from engines.portable.copies import copy_to_device
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    initialise = KVCacheManager.__init__

    def __init__(self: Any, **options: Any) -> None:
        initialise(self, **options)
        # Each request of a batch owns a page.
        staged = torch.zeros(self.num_blocks, self.max_blocks_per_seq, dtype=torch.int32)
        self.staged_block_offsets = maybe_pin_memory(staged, self.device)

    def copy_batch_block_offsets(self: Any, dst: Any, request_ids: Any) -> None:
        staged = self.staged_block_offsets[: len(request_ids)]
        staged.copy_(self.get_block_table(request_ids))
        # K and V apart, so that a device is given this very memory to copy from.
        for table in dst[0, : len(request_ids)].unbind(1):
            copy_to_device("block_offsets", table, staged)

    patch(KVCacheManager, "__init__", __init__)
    patch(KVCacheManager, "copy_batch_block_offsets", copy_batch_block_offsets)
