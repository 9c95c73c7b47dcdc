"""TRT-12: the map from tokens to requests is built for the target's layout, and a draft loop changes the layout."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP_EAGLE, Patch, bug


@bug(
    "TRT-12",
    kind="K1",
    workers=(EAGLE3, MTP_EAGLE, DRAFT_TARGET),
    title="From the second draft call on, tokens are mapped to requests as in the target forward",
    reference="TensorRT-LLM #16925, #17240",
    caught_by=(
        "req-idx-matches-layout",
        "slots-in-own-pages",
        "sparse-maps-equal-reference",
        "drafts-equal-reference",
        "acceptance-follows-agreement",
        "oracle-drafter-accepts-all",
        "batch-equals-requests-alone",
    ),
)
def stale_map(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata

    def _update_req_idx_per_token(self: Any) -> None:
        pass

    patch(DSAtrtllmAttentionMetadata, "_update_req_idx_per_token", _update_req_idx_per_token)
