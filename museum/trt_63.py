"""TRT-63: the indexer was prepared against the manager of the wrong cache, then not at all for the drafter.

Then it was prepared for the drafter in place, with some of its fields saved before and some not, and for replays only.
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


@bug(
    "TRT-63",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="in-place",
    title="The drafter's pages are written over the target's block_table, which is not put back",
    reference=_REFERENCE,
    caught_by=("sparse-tables-name-owned-pages",),
)
def block_table_overwritten(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa import metadata

    patch(metadata, "_CACHE_FIELDS", tuple(name for name in metadata._CACHE_FIELDS if name != "block_table"))


@bug(
    "TRT-63",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="eager",
    title="Draft calls outside graphs find the drafter's manager, and tables and slots of the target's indexer",
    reference=_REFERENCE,
    caught_by=("sparse-tables-name-owned-pages", "slots-in-own-pages", "cache-layout-does-not-matter"),
)
def tables_of_the_target(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    for name in ("_fields_with_draft_twins", "_refer_to_draft_twins"):
        patch(DSAtrtllmAttentionMetadata, name, getattr(TrtllmAttentionMetadata, name))


@bug(
    "TRT-63",
    kind="K7",
    workers=(EAGLE3, PARD),
    variant="replay",
    title="A graph is replayed with the drafter's tables of the last batch, as nothing writes them for a replay",
    reference=_REFERENCE,
    caught_by=("replay-equals-eager", "drafts-equal-reference"),
)
def replayed_without_tables(patch: Patch) -> None:
    from contextlib import nullcontext

    from engines.portable.pyexecutor import cuda_graph_runner

    patch(cuda_graph_runner, "draft_kv_cache_context", nullcontext)


@bug(
    "TRT-63",
    kind="K7",
    workers=(EAGLE3,),
    variant="pool-view",
    title="The drafter's first layer reads selected tokens through what the target's layers shared",
    reference=_REFERENCE,
    caught_by=("drafts-equal-reference", "cache-layout-does-not-matter"),
)
def view_of_the_target(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    refer = DSAtrtllmAttentionMetadata._refer_to_draft_twins

    def _refer_to_draft_twins(self: Any) -> None:
        valid = self._pool_cache_valid
        refer(self)
        self._pool_cache_valid = valid

    patch(DSAtrtllmAttentionMetadata, "_refer_to_draft_twins", _refer_to_draft_twins)
