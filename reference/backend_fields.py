"""What attention metadata of other backends has in the place of ``TrtllmAttentionMetadata``'s own fields."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from reference.batch import Batch
from reference.flash_infer import FlashInferRow, num_pages, page_tables
from reference.workers import DraftCall, Fields
from scenarios.model import Config
from scenarios.trace import UPDATED
from scenarios.traits import BACKENDS

OF_TRTLLM: Final = (
    "kv_lens_cuda",
    "kv_lens",
    "kv_lens_runtime",
    "host_total_kv_lens",
    "host_request_types",
    "prompt_lens_cpu",
    "prompt_lens_cuda",
    "spec_decoding_packed_mask",
    "spec_decoding_position_offsets",
    "spec_decoding_generation_lengths",
)
"""Fields that ``TrtllmAttentionMetadata`` declares itself, as its subclasses for sparse attention do."""


def shown(substep: str, fields: Fields, batch: Batch, config: Config) -> Fields:
    """``fields`` as the metadata of the backend has them, with what it keeps on the host.

    A view that a drafter reads saves nothing: what is saved are fields of the metadata it was made from. One of the
    drafter's own cache has KV lengths, which the draft loop of any worker moves. Before it does, nobody asks a view
    whether it verifies drafts.
    """
    backend = BACKENDS[config.attention_backend]
    if not (backend.draft_view or backend.one_page):
        return fields
    if not substep.startswith("draft["):
        more = on_host(batch, config) if substep != UPDATED else {}
        return {name: value for name, value in fields.items() if name not in OF_TRTLLM} | more
    left_out = set(OF_TRTLLM) if config.shares_target_kv else set(OF_TRTLLM) - {"kv_lens_cuda"}
    left_out |= {"use_spec_decoding"} if fields["use_spec_decoding"] else set()
    return {name: value for name, value in fields.items() if name not in left_out} | {"_saved_tensors": []}


def on_host(batch: Batch, config: Config) -> Fields:
    """What the metadata of the target keeps on the host from ``prepare()`` to the next, by the lengths it supposes."""
    backend = BACKENDS[config.attention_backend]
    if backend.draft_view:
        return {"num_blocks": [num_pages(row.kv, config.tokens_per_block) for row in batch.rows]}
    return {"num_cached_tokens_per_seq": [row.past for row in batch.rows]} if backend.one_page else {}


def tables(forward: Batch | DraftCall, host: Batch, config: Config) -> Fields:
    """Page tables that a forward of a FlashInfer backend finds; those of a view are in the pool that it reads.

    The target's list the pages of the lengths that the host supposes. How many pages a view lists beyond those in use
    is left open. One of the target's cache is told what is cached once the step is over, and adds nothing to it.
    """
    if not BACKENDS[config.attention_backend].draft_view:
        return {}
    rows = [FlashInferRow(kv - query, query) for query, kv in zip(forward.seq_lens, forward.kv_lens, strict=True)]
    is_view = isinstance(forward, DraftCall)
    page = config.pools[-1 if is_view else 0][1]
    of = page_tables(rows, forward.num_contexts, page)
    fields: Fields = {"_qo_indptr": of.qo_indptr, "_paged_kv_last_page_len": of.paged_kv_last_page_len}
    if is_view and config.shares_target_kv:
        return fields | {"_cached_token_lens": forward.kv_lens, "_draft_kv_runtime_lens": forward.kv_lens}
    fields |= {
        "_cached_token_lens": of.cached_token_lens,
        "_batch_indices": of.batch_indices,
        "_positions": of.positions,
    }
    if is_view:
        return fields | {"_draft_kv_runtime_lens": forward.kv_lens}
    pages = [num_pages(kv, page) for kv in host.kv_lens]
    first = host.num_contexts
    return fields | {
        "_paged_kv_indptr_prefill": list(accumulate(pages[:first], initial=0)),
        "_paged_kv_indptr_decode": list(accumulate(pages[first:], initial=0)),
        "_paged_kv_indptr": list(accumulate(pages, initial=0)),
    }
