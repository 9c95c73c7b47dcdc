"""TRT-63: the indexer was prepared against the manager of the wrong cache, then not at all for the drafter.

Upstream's drafter had a manager of its own; here target and drafter share one, and only the two mistakes are made.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM #11858, #11990, #12010"


@bug(
    "TRT-63",
    kind="K7",
    workers=(EAGLE3, PARD),
    title="The indexer's pages are those that another manager would have granted",
    reference=_REFERENCE,
    caught_by=("sparse-tables-name-owned-pages", "slots-in-own-pages", "indexer-keys-equal-cache"),
)
def another_manager(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    prepare_tables = DSAtrtllmAttentionMetadata.prepare_for_indexer_k_cache

    def prepare_for_indexer_k_cache(self: Any) -> None:
        prepare_tables(self)
        for table in (self.host_indexer_k_cache_block_offsets, self.indexer_k_cache_block_offsets):
            table.copy_((table + 1) % self.kv_cache_manager.num_blocks)

    patch(DSAtrtllmAttentionMetadata, "prepare_for_indexer_k_cache", prepare_for_indexer_k_cache)


@bug(
    "TRT-63",
    kind="K7",
    workers=(EAGLE3,),
    variant="skipped",
    title="The indexer is skipped for the drafter, whose keys are then nobody's",
    reference=_REFERENCE,
    caught_by=("indexer-keys-equal-cache", "kv-content-equals-reference", "drafts-equal-reference"),
)
def skipped_for_the_drafter(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.backend import DSATrtllmAttention

    store = DSATrtllmAttention._store

    def _store(self: Any, cache: Any, keys: Any, *args: Any) -> None:
        before = keys.pool.clone()
        store(self, cache, keys, *args)
        if cache is not self.tracer.target_cache:
            keys.pool.copy_(before)

    patch(DSATrtllmAttention, "_store", _store)
