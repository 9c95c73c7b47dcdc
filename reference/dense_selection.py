"""Rows of a sparse backend that see everything anyway, so that their indexer is skipped."""

from __future__ import annotations

from collections.abc import Sequence

from reference.batch import Batch
from reference.workers import DraftCall, Fields
from scenarios.model import Config


def skips(kv_lens: Sequence[int], extra: int, topk: int) -> bool:
    """Whether the indexer is skipped for rows of these KV lengths: none can outgrow the selection in this step.

    A drafter knows one token more than the KV index of its row says.

    extra  tokens by which the draft loop may lengthen a row
    """
    return bool(kv_lens) and max(kv_lens) + extra < topk


def dense(position: int, topk: int) -> list[int]:
    """What a row selects then: everything up to its own position, in order.

    A row beyond the selection's width would see its beginning only, without the newest tokens, so that no such row
    may be skipped.
    """
    return list(range(min(position + 1, topk)))


def selection(forward: Batch | DraftCall, batch: Batch, config: Config, *, graph: bool) -> Fields:
    """For which rows of a forward the indexer is skipped, and what they select; nothing on a dense backend.

    Contexts are skipped together, and so are generations, by the lengths of the target's forward. A former context
    counts as a generation once a draft loop goes on with one token per row, so that it keeps all of them from being
    skipped if it is long. A ``graph`` cannot decide anew in each replay, so that it skips nothing. An indexer over
    compressed tokens is never skipped.
    """
    if not config.index_topk or config.compress_ratios:
        return {}
    first, topk = forward.num_contexts, config.index_topk
    of_contexts, of_generations = (
        not graph and skips(kv_lens, config.num_extra_kv_tokens, topk)
        for kv_lens in (batch.kv_lens[:first], batch.kv_lens[first:])
    )
    return {
        "skip_indexer_for_ctx_reqs": of_contexts,
        "skip_indexer_for_gen_reqs": of_generations,
        "topk_indices_buffer": [
            dense(position, topk) if (of_contexts if row < first else of_generations) else None
            for row, (query, kv) in enumerate(zip(forward.seq_lens, forward.kv_lens, strict=True))
            for position in range(kv - query, kv)
        ],
    }
