"""VLL-21: a KV connector counts drafts among the tokens that are computed."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, EAGLE3_TREE, PARD, Patch, bug


@bug(
    "VLL-21",
    kind="K4",
    workers=(EAGLE3, PARD, EAGLE3_TREE),
    title="A connector saves all tokens that a step has fed, those of drafts that were not accepted too",
    reference="vLLM #44304",
    caught_by=("connector-saves-what-is-committed",),
)
def drafts_are_saved(patch: Patch) -> None:
    from engines.portable.pyexecutor.kv_cache_connector import KvCacheConnector

    def _computed_tokens(request: Any) -> int:
        fed: int = request.num_cached_tokens + request.py_rewind_len
        return fed

    patch(KvCacheConnector, "_computed_tokens", staticmethod(_computed_tokens))
