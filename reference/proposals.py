"""What the drafter thought of each draft, by which rejection sampling verifies it (upstream: ``draft_probs``).

A request's proposals are those of its last step, one per draft, whatever has been in the batch since and at whichever
row. Where nothing was drafted for a request the proposal is the placeholder's. What the target thinks of the place of a
draft is told by its digest there, which is the drafter's if both know the same tokens. So a draft that is the target's
choice is accepted, and would be rejected if its proposal were another one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reference.batch import Batch, Row
from reference.history import Drafts, History
from reference.workers.interface import Drafting, Fields
from scenarios.model import Config
from scenarios.tracer import NO_PROPOSAL, choose, proposal


def proposed(batch: Batch, drafting: Drafting, config: Config) -> Drafting:
    """The drafting with a proposal per draft."""
    if not config.rejection_sampling:
        return drafting
    rows = zip(batch.rows, drafting.drafts, strict=True)
    return replace(drafting, drafts=[replace(made, proposals=_of_row(batch, row, made, config)) for row, made in rows])


def _of_row(batch: Batch, row: Row, made: Drafts, config: Config) -> Sequence[int]:
    """The proposals of a row's drafts.

    Drafts that are made one after the other are each chosen after those before them. Of those that are made in one call
    each is chosen after what the drafter itself believes to come before it.
    """
    one_by_one = config.traits.drafts_for_contexts
    if row.is_context and not one_by_one:
        return filled((), batch.draft_len)
    reading = row.text.reading(row.end + 1)
    proposals: list[int] = []
    for depth, draft in enumerate(made.tokens):
        proposals.append(proposal(depth, reading.digest))
        reading.read(draft if one_by_one else choose(reading.digest))
    return proposals


def filled(proposals: Sequence[int], draft_len: int) -> list[int]:
    """The first so many proposals, and the placeholder's where there are fewer."""
    return [*proposals[:draft_len], *[NO_PROPOSAL] * (draft_len - len(proposals))]


def asked(batch: Batch, config: Config) -> Fields:
    """The proposals by which a forward verifies the drafts of each generation; those of a dummy may be anything."""
    if not config.rejection_sampling:
        return {}
    rows = [filled(row.proposals, row.drafts) if row.request is not None else None for row in batch.generations]
    return {"draft_probs": rows}


def left(batch: Batch, drafting: Drafting, config: Config) -> Fields:
    """The proposals of each row's new drafts, and how many generations were verified by those that they had."""
    if not config.rejection_sampling:
        return {}
    rows = zip(batch.rows, drafting.drafts, strict=True)
    return {
        "draft_probs": [[*made.proposals] if row.request is not None else None for row, made in rows],
        "rejection_rows": len(batch.generations) if batch.draft_len else 0,
    }


def kept(histories: Mapping[int, History], config: Config) -> Fields:
    """The proposals of the drafts that each request will verify next."""
    if not config.rejection_sampling:
        return {}
    return {"kept_draft_probs": {i: [*history.drafts.proposals] for i, history in histories.items()}}
