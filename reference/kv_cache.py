"""The ledgers of the KV-cache managers: how many tokens are granted and taken back, and the pages they need."""

from __future__ import annotations

from collections.abc import Mapping

from reference.batch import Batch, Row
from scenarios.model import Config


def granted(row: Row, first_turn: bool, width: int, config: Config) -> int:
    """KV tokens granted for a row before its forward, by either manager.

    The first chunk of a prompt gets the whole prompt, room for the draft loop and for ``width`` drafts; later
    chunks get nothing, a generation what it feeds. Under the overlap scheduler, which supposes that all
    drafts of the last step are accepted, a first chunk has room for the most drafts that a step can have.
    """
    if not row.is_context:
        return row.query
    if config.overlap:
        width = config.tokens_per_gen_step(config.max_draft_len) - 1
    return row.prompt_len + config.num_extra_kv_tokens + width if first_turn else 0


def dummies(batch: Batch, config: Config) -> list[int]:
    """KV tokens of the dummies that keep ranks in step, as long as it takes to launch it."""
    more = 1 + config.num_extra_kv_tokens + batch.width
    return [row.past + more for row in batch.generations if row.request is None]


def rewound(row: Row) -> int:
    """KV tokens taken back after the step: what was fed and not accepted (upstream: ``py_rewind_len``)."""
    return 0 if row.is_context else row.query - len(row.accepted)


def ledgers(kv_tokens: Mapping[int, int], config: Config) -> dict[str, object]:
    """Fields of every manager's ledger, given what each request holds.

    With a separate draft KV cache there are two, told the same; they differ in how many pages that takes.
    """
    fields: dict[str, object] = {}
    for prefix, (num_blocks, tokens_per_block) in zip(("", "draft_"), config.pools, strict=False):
        used = sum(-(-tokens // tokens_per_block) for tokens in kv_tokens.values())
        fields |= {f"{prefix}kv_tokens": dict(kv_tokens), f"{prefix}free_blocks": num_blocks - used}
    return fields
