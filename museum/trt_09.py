"""TRT-09: the metadata of a graph starts as a shallow copy, and what is not made anew stays shared."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, Patch, bug


@bug(
    "TRT-09",
    kind="K2",
    workers=(EAGLE3,),
    title="Captured graphs and served batches write to the same buffers",
    reference="TensorRT-LLM #17932",
    caught_by=("graph-buffers-apart", "graph-copies-share-no-state"),
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
    caught_by=("graph-buffers-apart", "graph-copies-share-no-state"),
)
def shallow_copy_of_maps(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    allocate = DSAtrtllmAttentionMetadata.__post_init__

    def __post_init__(self: Any) -> None:
        (TrtllmAttentionMetadata.__post_init__ if self.is_cuda_graph else allocate)(self)

    patch(DSAtrtllmAttentionMetadata, "__post_init__", __post_init__)


@bug(
    "TRT-09",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE),
    variant="saved",
    title="Captured graphs and served batches note what they have saved in the same place",
    reference="TensorRT-LLM #17932",
    caught_by=("graph-copies-share-no-state",),
)
def one_dict_of_saved_tensors(patch: Patch) -> None:
    from engines.portable.attention.backends.interface import AttentionMetadata

    create = AttentionMetadata.create_cuda_graph_metadata

    def create_cuda_graph_metadata(self: Any, *args: Any, **options: Any) -> Any:
        metadata = create(self, *args, **options)
        metadata._saved_tensors = self._saved_tensors
        return metadata

    patch(AttentionMetadata, "create_cuda_graph_metadata", create_cuda_graph_metadata)
