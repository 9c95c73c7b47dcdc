"""Fields that ``DSAtrtllmAttentionMetadata`` adds. Pages are not among them: which ones a request gets is free."""

from __future__ import annotations

from itertools import accumulate

from reference.batch import Batch
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
    return {
        "req_idx_per_token": [row for row, _ in owners],
        "slot_owners": owners,
        "gen_kv_indptr": list(accumulate((kv for _, kv in generations), initial=0)),
        "gen_cached_token_indptr": list(accumulate((kv - query for query, kv in generations), initial=0)),
        "kv_lens_cuda_2d": [[kv] * (1 + config.max_draft_len) for _, kv in generations],
        "max_gen_seq_len": 1 if updated else max((query for query, _ in generations), default=0),
    }
