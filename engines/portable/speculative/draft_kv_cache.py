"""Where a drafter with a KV cache of its own drafts: the attention metadata refers to that cache meanwhile.

Upstream has the two halves as functions too, ``prepare_attn_metadata_for_draft_replay`` and
``restore_attn_metadata_after_draft_replay``, which it calls around each replay of a graph. Neither undoes what it did
when it fails halfway, and its draft calls outside graphs leave the tables and slots of an indexer as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata


@contextmanager
def draft_kv_cache_context(attn_metadata: Any) -> Iterator[Any]:
    """Let the metadata refer to the manager of the draft KV cache, and to its tables; nothing without such a cache.

    Yields what is to be drafted with: the metadata, or the view that FlashInfer's has for drafters. However the block
    is left, the metadata then refers to the target's again, the very objects.
    """
    if isinstance(attn_metadata, FlashInferAttentionMetadata):
        manager = attn_metadata.draft_kv_cache_manager
        has_view = manager is not None or attn_metadata.draft_shares_kv
        yield attn_metadata.get_draft_metadata(manager) if has_view else attn_metadata
        return
    if not isinstance(attn_metadata, TrtllmAttentionMetadata) or attn_metadata.draft_kv_cache_manager is None:
        yield attn_metadata
        return
    saved = attn_metadata.prepare_for_draft_forward()
    try:
        yield attn_metadata
    finally:
        attn_metadata.restore_after_draft_forward(saved)
