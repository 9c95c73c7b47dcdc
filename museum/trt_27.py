"""TRT-27: a backend takes the generations of a batch to come first, and the engine puts contexts first."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, PARD, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #17986, #16021"
_NO_NUMBER = "TensorRT-LLM, no public number"
_FLASH_MLA = "flash-mla-tables-follow-block-tables"


@bug(
    "TRT-27",
    kind="K6",
    workers=(EAGLE3,),
    title="What a backend keeps per phase is sliced as if generations came first",
    reference=_REFERENCE,
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


@bug(
    "TRT-27",
    kind="K6",
    workers=(EAGLE3, SA),
    variant="flash-mla",
    title="The pages that flash MLA reads for the generations begin with those of the contexts",
    reference=_NO_NUMBER,
    caught_by=(_FLASH_MLA,),
)
def contexts_among_generations(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare = TrtllmAttentionMetadata.prepare_flash_mla

    def prepare_flash_mla(self: Any) -> None:
        prepare(self)
        rows = self.num_generations
        self.block_ids_per_seq[:rows].copy_(self.kv_block_ids_per_seq[:rows])

    patch(TrtllmAttentionMetadata, "prepare_flash_mla", prepare_flash_mla)


@bug(
    "TRT-27",
    kind="K1",
    workers=(DRAFT_TARGET, PARD),
    variant="flash-mla-rows",
    title="Behind the generations flash MLA finds pages of the larger batch before",
    reference=_NO_NUMBER,
    caught_by=(_FLASH_MLA,),
)
def rows_of_a_larger_batch(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    prepare = TrtllmAttentionMetadata.prepare_flash_mla

    def prepare_flash_mla(self: Any) -> None:
        before = self.block_ids_per_seq.clone()
        prepare(self)
        rows = self.num_generations
        self.block_ids_per_seq[rows:].copy_(before[rows:])

    patch(TrtllmAttentionMetadata, "prepare_flash_mla", prepare_flash_mla)
