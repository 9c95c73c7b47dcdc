"""TRT-42: the width of the block table follows from the longest request, without what speculation adds to it."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-42",
    kind="K4",
    workers=(EAGLE3, PARD),
    title="The block table is too narrow for a request near max_seq_len and its drafts",
    reference="TensorRT-LLM #12306, #12188",
    caught_by=("tables-name-owned-pages",),
)
def table_too_narrow(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    create = KVCacheManager.__init__

    def __init__(self: Any, **options: Any) -> None:
        create(self, **options)
        self.max_blocks_per_seq = self._blocks(self.max_seq_len)

    patch(KVCacheManager, "__init__", __init__)
