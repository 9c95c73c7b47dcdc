"""Suffix automaton: drafts continue the text of the request itself; there is no draft model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reference.batch import Batch, Row
from reference.drafter import rollout
from reference.history import Drafts, History
from reference.workers.interface import Drafting, SpecWorker


class SAWorker(SpecWorker):
    """Calls no model, so it neither saves nor moves anything of the attention metadata.

    The text of a request is its whole prompt, from its first chunk on, and what it has emitted.
    """

    name = "SAWorker"

    def saved_fields(self, phase: str) -> list[str]:
        """None."""
        return []

    def draft(self, batch: Batch) -> Drafting:
        """How the texts go on; that of a dummy is whatever its slot holds."""
        drafts = [Drafts(continuation(row, batch.draft_len)) for row in batch.rows]
        return Drafting([], drafts, batch.kv_lens, open=batch.has_dummies)

    def kept(self, histories: Mapping[int, History]) -> dict[str, Any]:
        """The texts, beside caches that nobody writes to."""
        return super().kept(histories) | {"automaton": {i: history.said for i, history in histories.items()}}


def continuation(row: Row, draft_len: int) -> list[int]:
    """What comes after the text, the accepted tokens included; nothing where it is to find no match.

    In the middle of a prompt the text ends with the prompt, and what the target samples is no part of it.
    """
    return rollout(row.text, max(row.prompt_len, row.end + 1), draft_len, row.agree) if row.agree else []


WORKER = SAWorker()
