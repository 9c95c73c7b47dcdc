"""VLL-02: between draft steps only lengths, positions and slots advance; what was built from them is kept."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "VLL-02",
    kind="K1",
    workers=(EAGLE3,),
    title="What attention derives from the lengths is rebuilt for the first draft step only",
    reference="vLLM #41162, #46849, #40756",
    caught_by=("drafts-equal-reference",),
)
def rebuilt_once(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    update = TrtllmAttentionMetadata.update_for_spec_dec

    def update_for_spec_dec(self: Any) -> None:
        # The loop switches this off once it has left the layout of the target.
        if self.use_spec_decoding:
            update(self)

    patch(TrtllmAttentionMetadata, "update_for_spec_dec", update_for_spec_dec)
