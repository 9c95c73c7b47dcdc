"""The ledger of the KV-cache manager: how many tokens are granted and taken back, and the pages they need."""

from __future__ import annotations

from collections.abc import Iterable

from reference.batch import Row
from scenarios.model import Config


def granted(row: Row, first_turn: bool, width: int, config: Config) -> int:
    """KV tokens granted for a row before its forward.

    The first chunk of a prompt gets the whole prompt, room for the draft loop and for ``width`` drafts; later
    chunks get nothing, a generation one token and its drafts.
    """
    if not row.is_context:
        return 1 + width
    return row.prompt_len + config.num_extra_kv_tokens + width if first_turn else 0


def rewound(row: Row, width: int) -> int:
    """KV tokens taken back after the step: drafts that were not accepted (upstream: ``py_rewind_len``)."""
    return 0 if row.is_context else width - (len(row.accepted) - 1)


def free_blocks(kv_tokens: Iterable[int], config: Config) -> int:
    """Pages of the pool that nobody owns, given what each request holds."""
    return config.num_blocks - sum(-(-tokens // config.tokens_per_block) for tokens in kv_tokens)
