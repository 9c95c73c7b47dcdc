"""TRT-39: without a separate drafter nobody counts the drafts of a generation when room is reserved for it."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, PARD, Patch, bug


@bug(
    "TRT-39",
    kind="K4",
    workers=(EAGLE3, PARD),
    title="A generation is granted one token, and feeds its drafts as well",
    reference="TensorRT-LLM #16101",
    caught_by=("kv-ledger-balanced", "kv-ledger-equals-reference", "tables-name-owned-pages"),
)
def drafts_not_reserved(patch: Patch) -> None:
    from engines.portable.pyexecutor.llm_request import ScheduledRequests
    from engines.portable.pyexecutor.resource_manager import KVCacheManager

    prepare = KVCacheManager.prepare_resources

    def prepare_resources(self: Any, scheduled_batch: Any) -> None:
        prepare(self, ScheduledRequests(context_requests=scheduled_batch.context_requests))
        for request in scheduled_batch.generation_requests:
            self._add_tokens(request, 1)

    patch(KVCacheManager, "prepare_resources", prepare_resources)
