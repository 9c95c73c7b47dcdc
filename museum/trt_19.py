"""TRT-19: only the update of the speculation parameters announces how many rows a generation feeds."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-19",
    kind="K1",
    workers=(EAGLE3, PARD),
    title="The kernels are not told that there are drafts, nor how many",
    reference="TensorRT-LLM #17247",
    caught_by=("speculation-flag-equals-reference",),
)
def draft_width_unannounced(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    def update_spec_dec_param(self: Any, *arguments: Any) -> None:
        pass

    patch(TrtllmAttentionMetadata, "update_spec_dec_param", update_spec_dec_param)
