"""TRT-27: a backend takes the generations of a batch to come first, and the engine puts contexts first."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-27",
    kind="K6",
    workers=(EAGLE3,),
    title="What a backend keeps per phase is sliced as if generations came first",
    reference="TensorRT-LLM #17986, #16021",
    caught_by=("request-types-match-layout", "host-kv-lens-consistent"),
)
def generations_first(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare_buffers = TrtllmAttentionMetadata.prepare

    def prepare(self: Any) -> None:
        prepare_buffers(self)
        contexts = slice(self.num_generations, self.num_seqs)
        self.host_request_types.fill_(1)
        self.host_request_types[contexts].fill_(0)
        self.host_total_kv_lens[0] = self.kv_lens_runtime[contexts].sum()
        self.host_total_kv_lens[1] = self.kv_lens_runtime.sum() - self.host_total_kv_lens[0]

    patch(TrtllmAttentionMetadata, "prepare", prepare)
