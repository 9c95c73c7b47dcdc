"""TRT-160: compressed attention, where counts, windows, slots and tables each follow something that changes in a step.

An entry of this suite's own: upstream's subclass for DeepSeek-V4 has the places in which DSA's metadata failed, and
more of them.
"""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, PARD, SA, Patch, bug

_REFERENCE = "TensorRT-LLM #16925"
_NO_NUMBER = "TensorRT-LLM, no public number"


def _of_target_only(patch: Patch, method: str) -> None:
    """Let a method of the metadata do nothing where a draft step calls it, in ``update_for_spec_dec``."""
    from engines.portable.attention.backends.sparse.deepseek_v4.metadata import DeepseekV4TrtllmAttentionMetadata

    update = getattr(DeepseekV4TrtllmAttentionMetadata, method)
    advance = DeepseekV4TrtllmAttentionMetadata.update_for_spec_dec

    def update_outside(self: Any) -> None:
        if not getattr(self, "_drafting", False):
            update(self)

    def update_for_spec_dec(self: Any) -> None:
        self._drafting = True
        try:
            advance(self)
        finally:
            self._drafting = False

    patch(DeepseekV4TrtllmAttentionMetadata, method, update_outside)
    patch(DeepseekV4TrtllmAttentionMetadata, "update_for_spec_dec", update_for_spec_dec)


@bug(
    "TRT-160",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE, PARD),
    title="Counts of compressed tokens stay those of the target's forward while drafts are made",
    reference=_REFERENCE,
    caught_by=("compressed-counts-follow-lengths", "compression-equals-reference"),
)
def stale_counts(patch: Patch) -> None:
    _of_target_only(patch, "_update_compressed_lens")


@bug(
    "TRT-160",
    kind="K1",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="windows",
    title="Windows of draft steps are those of the target's rows",
    reference=_REFERENCE,
    caught_by=("tokens-see-up-to-themselves", "drafts-equal-reference"),
)
def stale_windows(patch: Patch) -> None:
    _of_target_only(patch, "_update_local_indices")


@bug(
    "TRT-160",
    kind="K7",
    workers=(EAGLE3, MTP_EAGLE),
    variant="tables",
    title="A drafter with a cache of its own reads its window through the target's pages",
    reference="TensorRT-LLM #17892",
    caught_by=("compressed-tables-name-owned-pages",),
)
def window_of_the_target(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.deepseek_v4.metadata import DeepseekV4TrtllmAttentionMetadata
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    refer, fields = "_refer_to_draft_twins", "_fields_with_draft_twins"
    for name in (refer, fields):
        patch(DeepseekV4TrtllmAttentionMetadata, name, getattr(TrtllmAttentionMetadata, name))


@bug(
    "TRT-160",
    kind="K4",
    workers=(EAGLE3, SA),
    variant="last-token",
    title="A token does not see the compressed token that it completes",
    reference=_NO_NUMBER,
    caught_by=("tokens-see-up-to-themselves",),
)
def without_its_own(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.deepseek_v4.metadata import DeepseekV4TrtllmAttentionMetadata

    update = DeepseekV4TrtllmAttentionMetadata._update_local_indices

    def _update_local_indices(self: Any) -> None:
        update(self)
        window, tokens = self.sparse_metadata_params.window_size, self.num_tokens
        places = self.swa_local_indices[:tokens].amax(1)
        for layer, ratio in enumerate(self.sparse_metadata_params.compress_ratios):
            if layer:
                lens = self.sparse_mla_topk_lens[ratio][:tokens]
                lens.copy_(lens.clamp(max=window + places // ratio))

    patch(DeepseekV4TrtllmAttentionMetadata, "_update_local_indices", _update_local_indices)


@bug(
    "TRT-160",
    kind="K1",
    workers=(EAGLE3, SA),
    variant="rejected",
    title="What was compressed of rejected drafts is not compressed anew",
    reference=_NO_NUMBER,
    caught_by=("compressed-cache-is-made-of-tokens", "output-lossless"),
)
def kept_after_rejection(patch: Patch) -> None:
    import torch

    from engines.compressed_tracer import CompressedTracer

    store = CompressedTracer.store_compressed

    def store_compressed(self: Any, pool: Any, slots: Any, values: Any, exists: Any) -> None:
        kept = torch.take(pool, slots)
        store(self, pool, slots, torch.where(kept != 0, kept, values), exists)

    patch(CompressedTracer, "store_compressed", store_compressed)


@bug(
    "TRT-160",
    kind="K4",
    workers=(MTP_EAGLE, SA),
    variant="keys",
    title="Keys of the indexer are placed by the tokens that they stand for",
    reference=_NO_NUMBER,
    caught_by=("compressed-keys-follow-lengths",),
)
def keys_by_token(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.deepseek_v4 import metadata
    from engines.portable.attention.backends.sparse.dsa.indexer import slots_of

    def by_token(positions: Any, block_offsets: Any, req_idx: Any, manager: Any) -> Any:
        return slots_of(positions * manager.compress_ratios[1], block_offsets, req_idx, manager)

    patch(metadata, "slots_of", by_token)


@bug(
    "TRT-160",
    kind="K10",
    workers=(EAGLE3, PARD),
    variant="graph",
    title="The compressed tokens that a graph writes are those that the batch of its capture completed",
    reference=_NO_NUMBER,
    caught_by=("compressed-cache-is-made-of-tokens",),
)
def frozen_tokens(patch: Patch) -> None:
    import torch

    from engines.portable.attention.backends.sparse.deepseek_v4.metadata import DeepseekV4TrtllmAttentionMetadata

    update = DeepseekV4TrtllmAttentionMetadata._update_compressed_lens

    def _update_compressed_lens(self: Any) -> None:
        update(self)
        for buffers in (self.compressed_mask, self.compressed_position_ids):
            for buffer in buffers.values():
                part = buffer[: self.num_tokens]
                part.copy_(torch.tensor(part.tolist(), dtype=part.dtype))

    patch(DeepseekV4TrtllmAttentionMetadata, "_update_compressed_lens", _update_compressed_lens)
