"""Verify widths: what tells the kernels how many rows each generation has, where these numbers differ.

A generation that verifies v drafts feeds v + 1 tokens. Without verify widths one number for all of them would do, and
the kernels would know by a row's index whose it is.
"""

from __future__ import annotations

from reference.batch import Batch
from reference.workers import DraftCall, Fields
from scenarios.model import Config


def widths(batch: Batch, config: Config) -> Fields:
    """What a forward of the target must find, in a replay too, whatever its graph was captured with."""
    if not config.ragged_verify:
        return {}
    return {"gen_token_repeats_cuda": [row.query for row in batch.generations]}


def published(batch: Batch, config: Config) -> Fields:
    """What ``prepare()`` leaves: the widths on the device, and the host's list from which they are copied."""
    if not config.ragged_verify:
        return {}
    return {"ragged_verify_lens": [row.query for row in batch.generations]} | widths(batch, config)


def row_lengths(forward: Batch | DraftCall, config: Config) -> Fields:
    """Whose each row of the generations is, and how many tokens it sees: those up to its own.

    An indexer that selects for all rows of a generation at once would take the last row's length for all of them. Once
    a draft loop goes on with one token per row nobody asks any more.
    """
    if not (config.ragged_verify and config.index_topk) or (isinstance(forward, DraftCall) and forward.updated):
        return {}
    lens = list(zip(forward.seq_lens, forward.kv_lens, strict=True))[forward.num_contexts :]
    rows = [
        (request, kv - query + place + 1)
        for request, (query, kv) in enumerate(lens, forward.num_contexts)
        for place in range(query)
    ]
    return {
        "row_req_idx_cuda": [request for request, _ in rows],
        "row_kv_lens_cuda": [length for _, length in rows],
    }
