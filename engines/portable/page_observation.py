"""What the observer reads of backends whose page tables are arrays, or that have one page per sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata
from engines.portable.attention.backends.vanilla import VanillaAttentionMetadata


def host_page_fields(attn: Any) -> dict[str, Any]:
    """What lives on the host."""
    if isinstance(attn, VanillaAttentionMetadata):
        assert attn.block_ids_per_seq is not None
        assert attn.kv_cache_params is not None
        return {
            "cache_indices": [list(pages) for pages in attn.block_ids_per_seq],
            "num_cached_tokens_per_seq": list(attn.kv_cache_params.num_cached_tokens_per_seq),
        }
    if not isinstance(attn, FlashInferAttentionMetadata):
        return {}
    fields = {"num_blocks": list(attn.num_blocks)}
    # The table of a view grows after it was planned, and its kernels are told lengths instead.
    if attn._draft_kv_runtime_lens is None:
        fields["planned_num_blocks"] = list(attn.planned_num_blocks)
    return fields


def device_page_fields(attn: Any) -> dict[str, Any]:
    """What lives on the device: of the target, or of the view that a drafter reads."""
    if not isinstance(attn, FlashInferAttentionMetadata):
        return {}
    n, tokens, contexts = attn.num_seqs, attn.num_tokens, attn.num_contexts
    totals = attn._paged_kv_indptr[: n + 1].tolist()
    pages = attn._paged_kv_indices.tolist()
    fields = {
        "_qo_indptr": attn._qo_indptr[: n + 1].tolist(),
        "_paged_kv_indices": [pages[begin:end] for begin, end in pairwise(totals)],
        "_paged_kv_indptr_prefill": attn._paged_kv_indptr_prefill[: contexts + 1].tolist(),
        "_paged_kv_indptr_decode": attn._paged_kv_indptr_decode[: n - contexts + 1].tolist(),
        "_paged_kv_indptr": totals,
        "_paged_kv_last_page_len": attn._paged_kv_last_page_len[:n].tolist(),
        "_cached_token_lens": attn._cached_token_lens[:n].tolist(),
    }
    lens = attn._draft_kv_runtime_lens
    if lens is not None:
        fields["_draft_kv_runtime_lens"] = lens[:n].tolist()
    if lens is None or not attn._shares_kv:
        fields["_batch_indices"] = attn._batch_indices[:tokens].tolist()
        fields["_positions"] = attn._positions[:tokens].tolist()
    return fields
