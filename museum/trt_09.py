"""TRT-09: the metadata of a graph starts as a shallow copy, and what is not made anew stays shared."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-09",
    kind="K2",
    workers=(EAGLE3,),
    title="Captured graphs and served batches write to the same buffers",
    reference="TensorRT-LLM #17932",
    caught_by=("graph-buffers-apart",),
)
def shallow_copy(patch: Patch) -> None:
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    allocate = TrtllmAttentionMetadata.__post_init__

    def __post_init__(self: Any) -> None:
        if not self.is_cuda_graph:
            allocate(self)

    patch(TrtllmAttentionMetadata, "__post_init__", __post_init__)


@bug(
    "TRT-09",
    kind="K2",
    workers=(EAGLE3,),
    variant="sparse",
    title="Captured graphs and served batches share the maps of a sparse backend",
    reference="TensorRT-LLM #17932",
    caught_by=("graph-buffers-apart",),
)
def shallow_copy_of_maps(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    allocate = DSAtrtllmAttentionMetadata.__post_init__

    def __post_init__(self: Any) -> None:
        (TrtllmAttentionMetadata.__post_init__ if self.is_cuda_graph else allocate)(self)

    patch(DSAtrtllmAttentionMetadata, "__post_init__", __post_init__)
