"""TRT-23: attention takes generations of several tokens for contexts, and the worker splits its rows by that."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-23",
    kind="K6",
    workers=(EAGLE3,),
    title="The attention's count of contexts is not the scheduler's",
    reference="TensorRT-LLM #12795",
    caught_by=("layout-equals-reference", "steps-complete"),
)
def extended_context(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare_buffers = TrtllmAttentionMetadata.prepare

    def prepare(self: Any) -> None:
        if self.seq_lens[self.num_contexts :].gt(1).any():
            self.num_contexts = self.num_seqs
        prepare_buffers(self)

    patch(TrtllmAttentionMetadata, "prepare", prepare)
