"""What the observer reads of block reuse: the known pages of each cache, what they hold, and who has found some."""

from __future__ import annotations

from typing import Any

from engines.portable.attention.backends.trtllm import DRAFT_LAYER, TARGET_LAYER
from engines.portable.pyexecutor.py_executor import PyExecutor

KNOWN_CONTENT = {TARGET_LAYER: "known_kv", DRAFT_LAYER: "known_draft_kv"}
"""Which field says what known pages hold, by layer."""


def reusable_fields(executor: PyExecutor) -> dict[str, Any]:
    """Fields of the requests that own pages and of every known page; none without block reuse."""
    fields: dict[str, Any] = {}
    for prefix, manager in zip(("", "draft_"), executor.kv_cache_managers):
        blocks = manager.reusable_blocks
        if blocks is None:
            return {}
        pages = sorted(([block.owners, *block.key], i) for i, block in blocks.known().items())
        ids = [block_id for _, block_id in pages]
        fields[f"{prefix}known_pages"] = [page for page, _ in pages]
        fields[f"{prefix}known_page_ids"] = ids
        fields[f"{prefix}reclaim_order"] = [ids.index(block_id) for block_id in blocks.reclaim_order()]
        places = manager._memory_pool_indices(ids)
        for layer in manager.layer_offsets.keys() & KNOWN_CONTENT.keys():
            fields[KNOWN_CONTENT[layer]] = manager.get_buffers(layer)[places].tolist()
    flight = executor.previous_batch
    launched = () if flight is None else flight.iteration.batch.all_requests()
    requests = executor.active_requests | {request.py_request_id: request for request in launched}
    return {**fields, "reused_tokens": {i: requests[i].prepopulated_prompt_len for i in executor.held_requests}}
