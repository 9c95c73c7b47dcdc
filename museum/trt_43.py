"""TRT-43: what a prompt needs is worked out from two different numbers of tokens."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, PARD, Patch, bug


@bug(
    "TRT-43",
    kind="K4",
    workers=(EAGLE3, PARD, EAGLE3_TREE),
    title="Pages are counted for the tokens of a request, and the extra ones that it is granted have none",
    reference="TensorRT-LLM #16173",
    caught_by=("kv-ledger-balanced", "tables-name-owned-pages"),
)
def pages_without_extra_tokens(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    count = KVCacheManager._blocks

    def _blocks(self: Any, num_tokens: int) -> int:
        # Not yet there when the widest table is worked out.
        return count(self, num_tokens - getattr(self, "num_extra_kv_tokens", 0))

    patch(KVCacheManager, "_blocks", _blocks)
