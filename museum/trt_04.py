"""TRT-04: all warm-up forwards of a graph run on one preparation, and each moves the KV lengths on."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, MTP_EAGLE, Patch, bug


@bug(
    "TRT-04",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE),
    title="The graph runner does not put the KV lengths back between the warm-up forwards of a graph",
    reference="TensorRT-LLM #11696",
    caught_by=(
        "warmup-fixed-point",
        "draft-position-is-kv-minus-one",
        "kv-lens-within-pages",
        "warm-up-forward-is-a-fixed-point",
    ),
)
@bug(
    "TRT-04",
    kind="K2",
    workers=(EAGLE3_TREE,),
    title="The graph runner does not put the KV lengths back between the warm-up forwards of a graph",
    reference="TensorRT-LLM #11696",
    caught_by=("warmup-fixed-point", "kv-lens-equals-reference", "warm-up-forward-is-a-fixed-point"),
)
def kv_lens_drift(patch: Patch) -> None:
    from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner

    def _restore_kv_lens(self: Any, attn_metadata: Any, kv_lens: Any) -> None:
        attn_metadata.on_update_kv_lens()

    patch(CUDAGraphRunner, "_restore_kv_lens", _restore_kv_lens)
