"""TRT-41: the tokens that a draft loop needs beyond a request's length are forgotten on the way to the cache."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug


@bug(
    "TRT-41",
    kind="K4",
    workers=(EAGLE3,),
    title="The KV cache is not told of the extra tokens of speculation",
    reference="TensorRT-LLM #13619, #13935",
    caught_by=("kv-ledger-balanced", "kv-ledger-equals-reference"),
)
def extra_tokens_dropped(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    create = KVCacheManager.__init__

    def __init__(self: Any, **options: Any) -> None:
        create(self, **{**options, "num_extra_kv_tokens": 0})

    patch(KVCacheManager, "__init__", __init__)
