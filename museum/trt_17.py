"""TRT-17: running totals of the lengths are built once and serve all layers, until a hook says that they are stale."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, PARD, Patch, bug
from museum.trt_16 import hook_forgets


@bug(
    "TRT-17",
    kind="K1",
    workers=(EAGLE3, PARD),
    title="The running totals of the lengths are not rebuilt when a draft loop changes lengths and layout",
    reference="TensorRT-LLM #12161",
    caught_by=("drafts-equal-reference", "acceptance-follows-agreement", "oracle-drafter-accepts-all"),
)
def totals_survive_the_hook(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    def update_for_spec_dec(self: Any) -> None:
        pass

    patch(TrtllmAttentionMetadata, "update_for_spec_dec", update_for_spec_dec)


@bug(
    "TRT-17",
    kind="K1",
    workers=(EAGLE3, PARD),
    variant="generations",
    title="The generations' running totals of a sparse backend stay what prepare made them",
    reference="TensorRT-LLM #12161",
    caught_by=("gen-indptr-consistent", "sparse-maps-equal-reference"),
)
def totals_of_generations(patch: Patch) -> None:
    hook_forgets(patch, "gen_kv_indptr", "gen_cached_token_indptr")


@bug(
    "TRT-17",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE),
    variant="windows",
    title="Tokens of a chunk that is not the first select from their own chunk alone",
    reference="TensorRT-LLM #12161",
    caught_by=("context-windows-end-at-their-token", "selection-equals-reference"),
)
def windows_of_the_chunk(patch: Patch) -> None:
    from dataclasses import replace

    from engines.portable.attention.backends.sparse.dsa.prefill import IndexerParams

    windows = IndexerParams.windows

    def windows_without_the_cached(self: Any, num_contexts: int) -> Any:
        return windows(replace(self, cached_tokens=self.cached_tokens * 0), num_contexts)

    patch(IndexerParams, "windows", windows_without_the_cached)
