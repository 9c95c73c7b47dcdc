"""TRT-88: a copy from the host is part of the graph, and each replay loads what the host held at capture.

Upstream's copied the widths of a ragged verification; here it is the KV lengths.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


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
        attn_metadata.kv_lens_cuda[: attn_metadata.num_seqs].copy_(attn_metadata.kv_lens_runtime, non_blocking=True)
        preprocess_inputs(self, inputs)

    patch(PyTorchModelEngine, "_preprocess_inputs", _preprocess_inputs)
