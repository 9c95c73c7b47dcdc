"""What the observer reads of block reuse: which pages are known of each cache, what they hold, and who has found them."""

from __future__ import annotations

from typing import Any

from engines.portable.attention.backends.trtllm import DRAFT_LAYER, TARGET_LAYER
from engines.portable.pyexecutor.py_executor import PyExecutor

_CONTENT = {TARGET_LAYER: "known_kv", DRAFT_LAYER: "known_draft_kv"}


def reusable_fields(executor: PyExecutor) -> dict[str, Any]:
    """Fields of active requests and of every known page; none without block reuse."""
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
        for layer in manager.layer_offsets.keys() & _CONTENT.keys():
            fields[_CONTENT[layer]] = manager.get_buffers(layer)[places].tolist()
    reused = {i: request.prepopulated_prompt_len for i, request in executor.active_requests.items()}
    return {**fields, "reused_tokens": reused}
