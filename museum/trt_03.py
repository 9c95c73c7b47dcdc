"""TRT-03: the draft loop sets ``num_contexts`` to 0, and restoring tensors does not bring it back."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, EAGLE3_TREE, MTP_EAGLE, MTP_EAGLE_TREE, Patch, bug


@bug(
    "TRT-03",
    kind="K2",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET, EAGLE3_TREE, MTP_EAGLE_TREE),
    title="The number of context requests is not put back after the draft loop",
    reference="TensorRT-LLM #17381",
    caught_by=("restored-layout", "request-types-match-layout", "layout-equals-reference"),
)
def context_count_lost(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    def _restore_attn_metadata_from_spec_dec(self: Any, attn_metadata: Any) -> None:
        attn_metadata.restore_from_spec_dec()
        attn_metadata.host_request_types.copy_(self._saved_host_request_types)
        attn_metadata.on_update()
        self._spec_dec_attn_metadata = None

    patch(SpecWorkerBase, "_restore_attn_metadata_from_spec_dec", _restore_attn_metadata_from_spec_dec)
