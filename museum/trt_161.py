"""TRT-161: page tables as arrays, and views of them for drafters: what a view shares, and what it has to follow.

An entry of this suite's own. Two of upstream's habits are in it: the view is not refreshed between two forwards, and
its draft loop writes into the target's lengths.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, SA, Patch, bug

_NO_NUMBER = "TensorRT-LLM, no public number"


@bug(
    "TRT-161",
    kind="K4",
    workers=(EAGLE3, SA),
    title="The last page of a sequence that fills it is empty",
    reference=_NO_NUMBER,
    caught_by=("page-arrays-match-layout", "page-arrays-equal-reference"),
)
def empty_last_page(patch: Patch) -> None:
    from engines.portable.attention.backends import flashinfer

    patch(flashinfer, "last_page_lens", lambda kv_lens, page_size: kv_lens % page_size)


@bug(
    "TRT-161",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE),
    variant="positions",
    title="Draft steps write where the target's rows were, as only lengths are advanced",
    reference="TensorRT-LLM #16925",
    caught_by=("page-arrays-match-layout", "page-arrays-equal-reference", "drafts-equal-reference"),
)
def stale_positions(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    update = FlashInferAttentionMetadata._update_draft_kv_lengths

    def _update_draft_kv_lengths(self: Any, lens: Any) -> None:
        positions = self._positions.clone()
        update(self, lens)
        self._positions.copy_(positions)

    patch(FlashInferAttentionMetadata, "_update_draft_kv_lengths", _update_draft_kv_lengths)


@bug(
    "TRT-161",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE),
    variant="created-once",
    title="A view has the lengths and pages of the step that it was made in",
    reference=_NO_NUMBER,
    caught_by=("page-arrays-equal-reference",),
)
def never_synced(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    sync = FlashInferAttentionMetadata._sync_draft_view

    def _sync_draft_view(self: Any, target: Any) -> None:
        if not getattr(self, "_was_synced", False):
            sync(self, target)
        self._was_synced = True

    patch(FlashInferAttentionMetadata, "_sync_draft_view", _sync_draft_view)


@bug(
    "TRT-161",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE),
    variant="aliased",
    title="A draft loop on a view writes into the target's own lengths",
    reference=_NO_NUMBER,
    caught_by=("restored-layout", "host-equals-device"),
)
def aliased_lengths(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    get_view, sync = FlashInferAttentionMetadata.get_draft_metadata, FlashInferAttentionMetadata._sync_draft_view

    def get_draft_metadata(self: Any, draft_kv_cache_manager: Any = None) -> Any:
        return self._draft_metadata or get_view(self, draft_kv_cache_manager)

    def _sync_draft_view(self: Any, target: Any) -> None:
        sync(self, target)
        if not self._shares_kv:
            self._seq_lens = target._seq_lens

    patch(FlashInferAttentionMetadata, "get_draft_metadata", get_draft_metadata)
    patch(FlashInferAttentionMetadata, "_sync_draft_view", _sync_draft_view)


@bug(
    "TRT-161",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE),
    variant="all-fed",
    title="A drafter on the target's cache sees rejected drafts too",
    reference=_NO_NUMBER,
    caught_by=("page-arrays-equal-reference", "drafts-equal-reference"),
)
def rejected_seen(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    patch(FlashInferAttentionMetadata, "update_shared_kv_draft_lengths", lambda self, target, accepted, contexts: None)


@bug(
    "TRT-161",
    kind="K7",
    workers=(EAGLE3, MTP_EAGLE),
    variant="pages",
    title="A view of a cache of the drafter's own has the pages of the target's",
    reference="TensorRT-LLM #17892",
    caught_by=("page-arrays-name-owned-pages",),
)
def pages_of_the_target(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata
    from engines.process import replaced

    create, write = FlashInferAttentionMetadata._create_draft_view, FlashInferAttentionMetadata._write_page_table

    def _create_draft_view(self: Any, manager: Any) -> Any:
        view: Any = create(self, manager)
        view._other_manager = self.kv_cache_manager
        return view

    def _write_page_table(self: Any, num_blocks: Any) -> None:
        with replaced(self, "kv_cache_manager", getattr(self, "_other_manager", self.kv_cache_manager)):
            write(self, num_blocks)

    patch(FlashInferAttentionMetadata, "_create_draft_view", _create_draft_view)
    patch(FlashInferAttentionMetadata, "_write_page_table", _write_page_table)


@bug(
    "TRT-161",
    kind="K6",
    workers=(MTP_EAGLE, SA),
    variant="totals",
    title="Pages of generations are counted from the first context on",
    reference=_NO_NUMBER,
    caught_by=("page-totals-add-up",),
)
def totals_from_the_first_row(patch: Patch) -> None:
    import torch

    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    write = FlashInferAttentionMetadata._write_page_table

    def _write_page_table(self: Any, num_blocks: Any) -> None:
        write(self, num_blocks)
        totals = torch.tensor(self.num_blocks).cumsum(0)
        self._upload(self._paged_kv_indptr_decode[1:], totals[: self.num_generations])

    patch(FlashInferAttentionMetadata, "_write_page_table", _write_page_table)


@bug(
    "TRT-161",
    kind="K1",
    workers=(EAGLE3, SA),
    variant="plan",
    title="Kernels go by the plan of the first step, as page tables are written in place",
    reference=_NO_NUMBER,
    caught_by=("kernels-are-planned-for-the-step",),
)
def planned_once(patch: Patch) -> None:
    from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata

    plan = FlashInferAttentionMetadata._plan

    def _plan(self: Any) -> None:
        if not self.num_plans:
            plan(self)

    patch(FlashInferAttentionMetadata, "_plan", _plan)
