"""Fields that ``DSAtrtllmAttentionMetadata`` adds. Pages are not among them: which ones a request gets is free."""

from __future__ import annotations

from itertools import accumulate

from reference.batch import Batch
from reference.compressed_attention import searched
from reference.indexer_prefill import Chunk, windows
from reference.workers import DraftCall, Fields
from scenarios.model import Config


def derived(forward: Batch | DraftCall, config: Config, *, updated: bool) -> Fields:
    """What a forward must find: all of it follows from the lengths of its own rows (PR #16925).

    ``updated``: ``update_for_spec_dec`` has run since ``prepare()``, and expects one token per row from then on.
    A dense backend has none of these fields.
    """
    if not config.index_topk:
        return {}
    rows = list(zip(forward.seq_lens, forward.kv_lens, strict=True))
    owners = [[row, index] for row, (query, kv) in enumerate(rows) for index in range(kv - query, kv)]
    generations = rows[forward.num_contexts :]
    columns = 1 + config.max_draft_len
    ratio = config.compress_ratios[1] if config.compress_ratios else 1
    fields: Fields = {
        "req_idx_per_token": [row for row, _ in owners],
        "gen_kv_indptr": list(accumulate((kv for _, kv in generations), initial=0)),
        "gen_cached_token_indptr": list(accumulate((kv - query for query, kv in generations), initial=0)),
        # An indexer over compressed tokens is told how many of these there are.
        "kv_lens_cuda_2d": [[kv // ratio] * columns for _, kv in generations],
        "max_gen_seq_len": 1 if updated else max((query for query, _ in generations), default=0),
    }
    if config.compress_ratios:
        return fields
    # With one draft at most the kernels take the columns as they are, with verify widths a length of each row.
    expands = columns > 2 and not config.ragged_verify
    expanded = {"kv_lens_expanded_cuda": [kv for _, kv in generations for _ in range(columns)]} if expands else {}
    return fields | expanded | {"slot_owners": owners, "scale_owners": owners}


def prefill(batch: Batch, config: Config) -> Fields:
    """What ``prepare()`` says of the keys of contexts, which lie one request after the other."""
    if config.compress_ratios:
        return searched(batch, config)
    if not config.index_topk:
        return {}
    rows = batch.contexts
    seen = windows([Chunk(row.past, row.query) for row in rows])
    return {
        "cu_seqlen_ks": [start for start, _ in seen],
        "cu_seqlen_ke": [end for _, end in seen],
        "ctx_kv_indptr": list(accumulate((row.kv for row in rows), initial=0)),
        "ctx_cached_token_indptr": list(accumulate((row.past for row in rows), initial=0)),
    } | keys_of_contexts(batch, batch, config)


def keys_of_contexts(forward: Batch | DraftCall, batch: Batch, config: Config) -> Fields:
    """Where ``prepare()`` found all of their keys; a forward that has contexts looks there in the cache it reads."""
    if not config.index_topk or config.compress_ratios or not forward.num_contexts:
        return {}
    rows = enumerate(batch.contexts)
    return {"fullkv_owners": [[index, position] for index, row in rows for position in range(row.kv)]}
