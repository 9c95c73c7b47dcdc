"""TRT-20: what is derived from the verify widths of a step goes by others, or by lengths that have changed since."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"


@bug(
    "TRT-20",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET),
    title="Verify widths are published after prepare, which derives its buffers from those of the last step",
    reference=_REFERENCE,
    caught_by=("widths-agree-at-launch", "verify-widths-equal-reference", "verify-widths-do-not-matter"),
)
def published_late(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare = TrtllmAttentionMetadata._prepare_verify_widths

    def _prepare_verify_widths(self: Any) -> None:
        lens = self.ragged_verify_lens
        if lens:
            self.ragged_verify_lens = vars(self).get("published", lens)[: len(lens)]
        prepare(self)
        self.ragged_verify_lens = self.published = lens

    patch(TrtllmAttentionMetadata, "_prepare_verify_widths", _prepare_verify_widths)


@bug(
    "TRT-20",
    kind="K1",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="row-lengths",
    title="The KV lengths of single rows are those of prepare, whatever the overlap scheduler corrects",
    reference=_REFERENCE,
    caught_by=("row-lengths-count-down",),
)
def rows_not_refreshed(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    on_update = DSAtrtllmAttentionMetadata.on_update_kv_lens

    def on_update_kv_lens(self: Any, *args: Any, **kwargs: Any) -> None:
        prepared = self.row_kv_lens_cuda.clone()
        on_update(self, *args, **kwargs)
        self.row_kv_lens_cuda.copy_(prepared)

    patch(DSAtrtllmAttentionMetadata, "on_update_kv_lens", on_update_kv_lens)
