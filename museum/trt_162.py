"""TRT-162: one page per sequence and lengths on the host: both are looked up anew for each batch.

An entry of this suite's own; upstream's backend of this kind is its simplest, with which others are compared.
"""

from __future__ import annotations

from typing import Any

from museum.bug import SA, Patch, bug

_NO_NUMBER = "TensorRT-LLM, no public number"


@bug(
    "TRT-162",
    kind="K6",
    workers=(SA,),
    title="Pages are those of the rows of the last batch of this size",
    reference=_NO_NUMBER,
    caught_by=("one-page-per-sequence", "output-lossless"),
)
def pages_of_another_batch(patch: Patch) -> None:
    from engines.portable.attention.backends.vanilla import VanillaAttentionMetadata

    prepare = VanillaAttentionMetadata.prepare

    def lazily(self: Any) -> None:
        if self.block_ids_per_seq is None or len(self.block_ids_per_seq) != self.num_seqs:
            prepare(self)

    patch(VanillaAttentionMetadata, "prepare", lazily)


@bug(
    "TRT-162",
    kind="K1",
    workers=(SA,),
    variant="lengths",
    title="What is cached of each row is what it was in the step before",
    reference=_NO_NUMBER,
    caught_by=("output-lossless", "target-cache-holds-the-text"),
)
def lengths_of_the_step_before(patch: Patch) -> None:
    from engines.portable.attention.backends.vanilla import VanillaAttentionMetadata

    prepare = VanillaAttentionMetadata.prepare

    def one_step_behind(self: Any) -> None:
        prepare(self)
        before = getattr(self, "_before", self.kv_cache_params)
        self._before = self.kv_cache_params
        if len(before.num_cached_tokens_per_seq) == self.num_seqs:
            self.kv_cache_params = before

    patch(VanillaAttentionMetadata, "prepare", one_step_behind)


@bug(
    "TRT-162",
    kind="K6",
    workers=(SA,),
    variant="sorted",
    title="Pages are looked up in the order of their ids, not of the batch",
    reference=_NO_NUMBER,
    caught_by=("one-page-per-sequence",),
)
def sorted_pages(patch: Patch) -> None:
    from engines.portable.attention.backends.vanilla import VanillaAttentionMetadata

    prepare = VanillaAttentionMetadata.prepare

    def by_id(self: Any) -> None:
        prepare(self)
        self.block_ids_per_seq = sorted(self.block_ids_per_seq or [])

    patch(VanillaAttentionMetadata, "prepare", by_id)
