"""TRT-32: tokens reserved for drafting count for the capacity, not for what attention may look at."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-32",
    kind="K3",
    workers=(EAGLE3,),
    title="The kernels are told the capacity, extra tokens included, as the KV length",
    reference="TensorRT-LLM #9210",
    caught_by=("host-kv-lens-consistent", "kv-lens-equals-reference"),
)
def capacity_as_length(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare_buffers = TrtllmAttentionMetadata.prepare

    def prepare(self: Any) -> None:
        prepare_buffers(self)
        self.kv_lens_runtime = self.kv_lens[: self.num_seqs].clone()

    patch(TrtllmAttentionMetadata, "prepare", prepare)
