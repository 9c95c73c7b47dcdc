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
    from engines.portable.attention.backends.trtllm import DRAFT_LAYER

    store = DSATrtllmAttention._store

    def _store(self: Any, layer: int, attn_metadata: Any, *args: Any) -> None:
        if layer != DRAFT_LAYER:
            store(self, layer, attn_metadata, *args)
            return
        keys = attn_metadata.kv_cache_manager.get_indexer_k_cache_buffers(layer)
        before = keys.clone()
        store(self, layer, attn_metadata, *args)
        keys.copy_(before)

    patch(DSATrtllmAttention, "_store", _store)


@bug(
    "TRT-63",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="expanded",
    title="The pages that are repeated for each row of a generation are those of the step before",
    reference=_REFERENCE,
    caught_by=("expanded-rows-follow-their-generation",),
)
def repeated_pages(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    prepare_tables = DSAtrtllmAttentionMetadata.prepare_for_indexer_k_cache
    repeat_pages = DSAtrtllmAttentionMetadata.prepare_for_spec_decode

    def prepare_for_indexer_k_cache(self: Any) -> None:
        if hasattr(self, "host_indexer_k_cache_block_offsets"):
            repeat_pages(self)
        prepare_tables(self)

    def prepare_for_spec_decode(self: Any) -> None:
        pass

    patch(DSAtrtllmAttentionMetadata, "prepare_for_indexer_k_cache", prepare_for_indexer_k_cache)
    patch(DSAtrtllmAttentionMetadata, "prepare_for_spec_decode", prepare_for_spec_decode)
