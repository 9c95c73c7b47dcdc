"""VLL-02: between draft steps only lengths, positions and slots advance; what was built from them is kept."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP, Patch, bug

_REFERENCE = "vLLM #41162, #46849, #40756"


@bug(
    "VLL-02",
    kind="K1",
    workers=(EAGLE3,),
    title="What attention derives from the lengths is rebuilt for the first draft step only",
    reference=_REFERENCE,
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


@bug(
    "VLL-02",
    kind="K1",
    workers=(MTP,),
    variant="inputs",
    title="All MTP layers are given the tokens of the first, so that each but that one looks too short a way ahead",
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference", "layers-look-ahead", "drafts-equal-reference"),
)
def inputs_of_the_first_layer(patch: Patch) -> None:
    from engines.portable.speculative.mtp import MTPWorker

    def _shift_inputs(self: Any, inputs: Any, last_tokens: Any, tokens: Any, hidden_states: Any) -> Any:
        return inputs

    patch(MTPWorker, "_shift_inputs", _shift_inputs)
