"""TRT-65: tables that the target's manager has and the drafter's never got, and a swap that stops halfway."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, MTP, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM #17892, #16887"
_LEFT = ("manager-follows-forward", "tables-follow-manager")


@bug(
    "TRT-65",
    kind="K7",
    workers=(EAGLE3, PARD),
    title="Nothing writes the tables of the drafter's indexer",
    reference=_REFERENCE,
    caught_by=("sparse-tables-name-owned-pages", "drafts-equal-reference"),
)
def no_tables(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    refer = TrtllmAttentionMetadata._refer_to_draft_twins

    def _refer_to_draft_twins(self: Any) -> None:
        refer(self)
        self._invalidate_pool_view_cache()

    patch(DSAtrtllmAttentionMetadata, "_refer_to_draft_twins", _refer_to_draft_twins)


@bug(
    "TRT-65",
    kind="K7",
    workers=(EAGLE3,),
    variant="halfway",
    title="A swap that fails leaves the metadata with the drafter's manager and tables",
    reference=_REFERENCE,
    caught_by=_LEFT,
)
def swap_not_undone(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    def prepare_for_draft_forward(self: Any) -> Any:
        saved = {name: getattr(self, name) for name in self._fields_with_draft_twins()}
        self._refer_to_draft_twins()
        return saved

    patch(TrtllmAttentionMetadata, "prepare_for_draft_forward", prepare_for_draft_forward)


@bug(
    "TRT-65",
    kind="K7",
    workers=(EAGLE3, DRAFT_TARGET, PARD, MTP, EAGLE3_TREE),
    variant="failure",
    title="A drafter that fails leaves the metadata with its own manager and tables",
    reference=_REFERENCE,
    caught_by=_LEFT,
)
def not_restored_after_a_failure(patch: Patch) -> None:
    from contextlib import contextmanager

    from engines.portable.speculative import linear, mtp, pard

    @contextmanager
    def draft_kv_cache_context(attn_metadata: Any) -> Any:
        if attn_metadata.draft_kv_cache_manager is None:
            yield
            return
        saved = attn_metadata.prepare_for_draft_forward()
        yield
        attn_metadata.restore_after_draft_forward(saved)

    for module in (linear, mtp, pard):
        patch(module, "draft_kv_cache_context", draft_kv_cache_context)


@bug(
    "TRT-65",
    kind="K7",
    workers=(EAGLE3, PARD, MTP),
    variant="block-offsets",
    title="While drafting the metadata has the drafter's manager and the target's block table",
    reference=_REFERENCE,
    caught_by=("tables-follow-manager",),
)
def table_not_swapped(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    def _refer_to_draft_twins(self: Any) -> None:
        self.kv_cache_manager = self.draft_kv_cache_manager

    patch(TrtllmAttentionMetadata, "_refer_to_draft_twins", _refer_to_draft_twins)
