"""TRT-16: what is derived from the KV lengths is built in ``prepare``, and the hook refreshes only part of it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, PARD, Patch, bug


def hook_forgets(patch: Patch, *buffers: str) -> None:
    """Let ``on_update_kv_lens`` of the DSA backend leave some buffers as they are."""
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
    from engines.process import replaced

    hook = DSAtrtllmAttentionMetadata.on_update_kv_lens

    def on_update_kv_lens(self: Any, **options: Any) -> None:
        with ExitStack() as kept:
            for name in buffers:
                kept.enter_context(replaced(self, name, getattr(self, name).clone()))
            hook(self, **options)

    patch(DSAtrtllmAttentionMetadata, "on_update_kv_lens", on_update_kv_lens)


_TITLE = "The indexer's KV lengths per draft row stay what prepare made them"
_REFERENCE = "TensorRT-LLM #14133"


@bug(
    "TRT-16",
    kind="K1",
    workers=(EAGLE3,),
    title=_TITLE,
    reference=_REFERENCE,
    caught_by=("gen-kv-lens-in-every-column", "sparse-maps-equal-reference", "drafts-equal-reference"),
)
def window_too_long(patch: Patch) -> None:
    hook_forgets(patch, "kv_lens_cuda_2d")


@bug(
    "TRT-16",
    kind="K1",
    workers=(PARD,),
    title=_TITLE,
    reference=_REFERENCE,
    caught_by=("gen-kv-lens-in-every-column", "sparse-maps-equal-reference"),
)
def parallel_window(patch: Patch) -> None:
    hook_forgets(patch, "kv_lens_cuda_2d")


@bug(
    "TRT-16",
    kind="K1",
    workers=(EAGLE3, PARD),
    variant="expanded",
    title="Of the two forms that the KV lengths of the generations have, the repeated one stays what prepare made it",
    reference=_REFERENCE,
    caught_by=("expanded-rows-follow-their-generation", "selection-equals-reference"),
)
def repeated_lengths(patch: Patch) -> None:
    hook_forgets(patch, "kv_lens_expanded_cuda")


@bug(
    "TRT-16",
    kind="K1",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="dense",
    title="In the draft loop short sequences attend to the tokens that the target's rows of that number attended to",
    reference=_REFERENCE,
    caught_by=("skipped-rows-see-all-of-theirs", "selection-equals-reference", "drafts-equal-reference"),
)
def dense_rows(patch: Patch) -> None:
    hook_forgets(patch, "topk_indices_buffer")


@bug(
    "TRT-16",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE),
    variant="scales",
    title="In the draft loop the scales of the keys go where the target's rows had theirs",
    reference=_REFERENCE,
    caught_by=("slots-in-own-pages",),
)
def scales(patch: Patch) -> None:
    hook_forgets(patch, "slot_mapping_scale")
