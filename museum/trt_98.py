"""TRT-98: the layers of MTP-Eagle's tree are told KV lengths of generations that lack one layer of nodes.

Upstream's worker lets contexts grow by a layer with the first forward, generations with the second only, so the
nodes of a generation are written over the last tokens that it has accepted.
"""

from __future__ import annotations

from typing import Any

from museum.bug import MTP_EAGLE_TREE, Patch, bug


@bug(
    "TRT-98",
    kind="K1",
    workers=(MTP_EAGLE_TREE,),
    title="The layers of a generation's tree lack one layer in their KV lengths, and overwrite what it has accepted",
    reference="TensorRT-LLM, no public number",
    caught_by=("kv-lens-equals-reference", "drafts-equal-reference", "kv-content-equals-reference"),
)
def one_layer_short(patch: Patch) -> None:
    from engines.portable.speculative.mtp_dynamic_tree import MTPEagleDynamicTreeWorker

    forget_placeholders = MTPEagleDynamicTreeWorker._forget_placeholders

    def _forget_placeholders(self: Any, attn_metadata: Any, num_accepted: Any) -> None:
        forget_placeholders(self, attn_metadata, num_accepted)
        gens = slice(attn_metadata.num_contexts, attn_metadata.num_seqs)
        attn_metadata.kv_lens_cuda[gens].sub_(self.dynamic_tree_max_topK)

    patch(MTPEagleDynamicTreeWorker, "_forget_placeholders", _forget_placeholders)
