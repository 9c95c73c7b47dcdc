"""TRT-93: drafting writes on the host's sequence lengths although who verifies may still have to read them."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, Patch, bug


@bug(
    "TRT-93",
    kind="K11",
    workers=(EAGLE3, DRAFT_TARGET),
    title="The host's sequence lengths are not saved while drafting sets them to 1",
    reference="TensorRT-LLM #14008",
    caught_by=("saved-fields", "restored-layout", "host-equals-device", "copies-are-not-overtaken"),
)
def host_lengths_overwritten(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def _fields_to_save(self: Any, attn_metadata: Any) -> tuple[str, ...]:
        return ("_seq_lens_cuda",)

    patch(SpecWorkerBase, "_fields_to_save", _fields_to_save)
