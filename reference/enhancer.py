"""The suffix automaton beside another drafter (upstream: ``SADraftEnhancer`` with a ``SuffixAutomatonManager``).

The drafter drafts for each row as if there were none. Afterwards the drafts of a generation whose text ends with a
long enough repetition are replaced, all of them, by how the text goes on after the place that it repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reference.batch import Batch, Row
from reference.drafter import rollout
from reference.history import Drafts, History
from reference.workers.interface import Drafting, Fields
from scenarios.model import Config


def enhanced(batch: Batch, drafting: Drafting) -> Drafting:
    """The same calls, with drafts that the next step will verify; those of the drafter itself are kept beside them."""
    pairs = zip(batch.rows, drafting.drafts, strict=True)
    drafts = [
        Drafts(continuation(row, batch.draft_len), model=made.tokens) if row.overridden else made for row, made in pairs
    ]
    return replace(drafting, drafts=drafts)


def continuation(row: Row, draft_len: int) -> list[int]:
    """How the text of a generation goes on: ``agree`` counts for it where it takes over, and it disagrees elsewhere."""
    return rollout(row.text, row.end + 1, draft_len, row.agree if row.overridden else 0)


def found(batch: Batch, config: Config) -> Fields:
    """What the automata of the generations have found after a forward; that of a dummy is whatever its slot holds."""
    if not (config.sa_threshold and batch.draft_len and batch.generations):
        return {}
    matches = {"sa_match_len": [row.match for row in batch.generations]}
    if batch.has_dummies:
        return matches
    return matches | {"sa_draft_tokens": [continuation(row, batch.draft_len) for row in batch.generations]}


def texts(histories: Mapping[int, History]) -> Fields:
    """What the automaton of each request holds: its whole prompt, from its first chunk on, and what it has emitted.

    The token that the prompt ends with is added with the first generation, which does not accept it itself; steps
    that draft nothing are no exception.
    """
    return {"automaton": {i: _text(history) for i, history in histories.items()}}


def _text(history: History) -> list[int]:
    return history.said if history.past > history.prompt_len else history.said[: history.prompt_len]
