"""TRT-62: a page keeps its id when it is swapped to the host and back, and is not where the id says any more."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM #13124"


@bug(
    "TRT-62",
    kind="K7",
    workers=(EAGLE3, PARD),
    title="The tables of the drafter's indexer name pages by their ids",
    reference=_REFERENCE,
    caught_by=("sparse-tables-name-owned-pages",),
)
def ids_in_draft_tables(patch: Patch) -> None:
    from engines.portable._utils import host_tensor
    from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
    from engines.portable.attention.backends.trtllm import TARGET_LAYER

    decoded = DSACacheManager.get_pool_block_indices

    def get_pool_block_indices(self: Any, request_ids: Any) -> Any:
        indices = decoded(self, request_ids)
        if TARGET_LAYER not in self.layer_offsets:
            for row, request_id in zip(indices, request_ids):
                ids = self.get_block_ids(request_id)
                # Past the end of the pool upstream's kernels read whatever was there.
                row[: len(ids)] = host_tensor(ids, self.device) % self.num_blocks
        return indices

    patch(DSACacheManager, "get_pool_block_indices", get_pool_block_indices)


@bug(
    "TRT-62",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="block-offsets",
    title="The block tables of both caches name pages by their ids",
    reference=_REFERENCE,
    caught_by=("kernels-get-pool-indices", "kv-content-equals-reference"),
)
def ids_in_tables(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager
    from engines.process import replaced

    table = KVCacheManager.get_block_table

    def get_block_table(self: Any, request_ids: Any) -> Any:
        with replaced(self, "_offloading", None):
            return table(self, request_ids) % self.num_blocks

    patch(KVCacheManager, "get_block_table", get_block_table)


@bug(
    "TRT-62",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="content",
    title="A page is somewhere else after a swap, and what it held is not",
    reference=_REFERENCE,
    caught_by=(
        "target-cache-holds-the-text",
        "kv-content-equals-reference",
        "cache-layout-does-not-matter",
        "draft-lengths-do-not-matter",
    ),
)
def content_stays(patch: Patch) -> None:
    from engines.portable.pyexecutor.host_offload import HostOffload

    swap = HostOffload.swap

    def swap_ids(self: Any, free_blocks: Any, pools: Any) -> None:
        swap(self, free_blocks, pools.clone())

    patch(HostOffload, "swap", swap_ids)
