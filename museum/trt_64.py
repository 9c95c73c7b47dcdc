"""TRT-64: on one version of the KV-cache manager no draft is ever accepted, and everything else works.

The issue does not say why; the cause here is made up, its effect is the one reported.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-64",
    kind="K7",
    workers=(EAGLE3, PARD),
    title="The V1 manager gives the drafter's indexer the pages of other rows",
    reference="TensorRT-LLM #18662",
    caught_by=("sparse-tables-name-owned-pages", "drafts-equal-reference", "cache-layout-does-not-matter"),
)
def pages_of_other_rows(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager, DSACacheManagerV2
    from engines.portable.attention.backends.trtllm import TARGET_LAYER

    indices = DSACacheManager.get_pool_block_indices

    def get_pool_block_indices(self: Any, request_ids: Any) -> Any:
        found = indices(self, request_ids)
        drafts = TARGET_LAYER not in self.layer_offsets and not isinstance(self, DSACacheManagerV2)
        return found.flip(0) if drafts else found

    patch(DSACacheManager, "get_pool_block_indices", get_pool_block_indices)
