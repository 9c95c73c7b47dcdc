"""TRT-13: a stale map made block ordinals that lie beyond the table; they were clamped, and the map stayed stale."""

from __future__ import annotations

from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, Patch, bug
from museum.trt_12 import stale_map

_REFERENCE = "TensorRT-LLM #12657"


@bug(
    "TRT-13",
    kind="K1",
    workers=(EAGLE3, DRAFT_TARGET),
    title="Tokens of a stale map that lie beyond the block table are put into its last page",
    reference=_REFERENCE,
    caught_by=("req-idx-matches-layout", "slots-in-own-pages", "drafts-equal-reference"),
)
def clamped(patch: Patch) -> None:
    # The clamp is there; the map is what it hides.
    stale_map(patch)


@bug(
    "TRT-13",
    kind="K1",
    workers=(EAGLE3,),
    variant="unclamped",
    title="Tokens of a stale map that lie beyond the block table stop the draft loop",
    reference=_REFERENCE,
    caught_by=("steps-complete",),
)
def unclamped(patch: Patch) -> None:
    from engines.portable.attention.backends.sparse.dsa import metadata
    from engines.portable.attention.backends.sparse.dsa.indexer import slots_of

    def checked(positions: Any, block_offsets: Any, req_idx: Any, manager: Any) -> Any:
        ordinals = positions // manager.tokens_per_block
        assert not bool((ordinals >= block_offsets.shape[1]).any()), "slot mapping: a block ordinal is out of range"
        return slots_of(positions, block_offsets, req_idx, manager)

    stale_map(patch)
    patch(metadata, "slots_of", checked)
