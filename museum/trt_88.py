"""TRT-88: a copy from the host is part of the graph, and each replay loads what the host held at capture.

Upstream's copied the widths of a ragged verification, as one of these does; the other copies KV lengths.
"""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, PARD, Patch, bug


@bug(
    "TRT-88",
    kind="K10",
    workers=(EAGLE3, PARD),
    title="A replayed graph loads the KV lengths of its capture from the host",
    reference="TensorRT-LLM, no public number",
    caught_by=("replay-equals-eager", "kv-lens-balanced", "captured-values-do-not-matter"),
)
def lengths_of_the_capture(patch: Patch) -> None:
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    preprocess_inputs = PyTorchModelEngine._preprocess_inputs

    def _preprocess_inputs(self: Any, inputs: dict[str, Any]) -> None:
        attn_metadata = inputs["attn_metadata"]
        lens = attn_metadata.kv_lens_runtime
        # A graph has no hold on the host memory that it reads.
        self.kept = [*vars(self).get("kept", ()), lens]
        attn_metadata.kv_lens_cuda[: attn_metadata.num_seqs].copy_(lens, non_blocking=True)
        preprocess_inputs(self, inputs)

    patch(PyTorchModelEngine, "_preprocess_inputs", _preprocess_inputs)


@bug(
    "TRT-88",
    kind="K10",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="widths",
    title="A replayed graph loads the verify widths of its capture from the host",
    reference="TensorRT-LLM, no public number",
    caught_by=("replay-equals-eager", "captured-values-do-not-matter"),
)
def widths_of_the_capture(patch: Patch) -> None:
    from engines.portable._utils import host_tensor
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
    from engines.portable.pyexecutor.model_engine import PyTorchModelEngine

    prepare, preprocess_inputs = TrtllmAttentionMetadata._prepare_verify_widths, PyTorchModelEngine._preprocess_inputs

    def _prepare_verify_widths(self: Any) -> None:
        prepare(self)
        if self.ragged_verify_lens:
            # All of them: what a graph copies from must live as long as it.
            self.staged = [*vars(self).get("staged", ()), host_tensor(self.ragged_verify_lens, self.device)]

    def _preprocess_inputs(self: Any, inputs: dict[str, Any]) -> None:
        attn_metadata = inputs["attn_metadata"]
        # Other backends have no such widths.
        if getattr(attn_metadata, "ragged_verify_lens", None):
            attn_metadata.verify_widths.copy_(attn_metadata.staged[-1], non_blocking=True)
        preprocess_inputs(self, inputs)

    patch(TrtllmAttentionMetadata, "_prepare_verify_widths", _prepare_verify_widths)
    patch(PyTorchModelEngine, "_preprocess_inputs", _preprocess_inputs)
