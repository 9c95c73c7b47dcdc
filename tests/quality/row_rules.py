"""Wrong rules of the oracle about recurrent states and proposals."""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, MTP_EAGLE, MTP_EAGLE_TREE, PARD, SA, Patch
from reference import proposals, recurrent
from reference.batch import Batch, Row
from scenarios import Config
from scenarios.tracer import EMPTY, recurrent_state
from tests.quality.wrong_rules import Fields, edit, rule


@rule("the state of all that was fed", EAGLE3, "hybrid")
def rejected_too(patch: Patch) -> None:
    """The live state is that after the last token fed, accepted or not."""

    def change(fields: Fields, of: Batch, *_: Any) -> Fields:
        if "ssm_states" not in fields:
            return fields
        states = [recurrent.after_each(row)[-1] if row.request is not None else None for row in of.rows]
        return {**fields, "ssm_states": states}

    edit(patch, recurrent, "left", change)


@rule("the state before the last token", SA, "hybrid")
def one_behind(patch: Patch) -> None:
    """What is kept of a request lacks its last cached token, as what it has said goes one beyond the cache."""
    right = recurrent.kept

    def kept(histories: Any, config: Config) -> Fields:
        fields = right(histories, config)
        behind = {i: recurrent.state(history.text, history.past - 1) for i, history in histories.items()}
        return {**fields, "recurrent_states": behind} if fields else fields

    patch(recurrent, "kept", kept)


@rule("contexts are promoted, too", MTP_EAGLE, "hybrid")
def contexts_promoted(patch: Patch) -> None:
    """States are promoted in every forward."""

    def change(fields: Fields, *_: Any) -> Fields:
        return {**fields, "update_mamba_states": 1} if "update_mamba_states" in fields else fields

    edit(patch, recurrent, "left", change)


@rule("each chunk begins anew", EAGLE3, "hybrid in chunks")
def chunks_begin_anew(patch: Patch) -> None:
    """A context goes on from no state, whatever chunks came before."""

    def change(fields: Fields, of: Batch, *_: Any) -> Fields:
        if not fields:
            return fields
        states = zip(of.rows, fields["ssm_states"], strict=True)
        return {"ssm_states": [None if row.is_context else found for row, found in states]}

    edit(patch, recurrent, "found", change)


@rule("siblings go on from each other", MTP_EAGLE_TREE, "hybrid")
def siblings_in_a_row(patch: Patch) -> None:
    """The state of a node goes on from the node before it, as in a chain."""

    def after_each(row: Row) -> list[int]:
        states = [recurrent.state(row.before, row.past)]
        for token, position in zip(row.tokens, row.positions, strict=True):
            states.append(recurrent_state(states[-1], position, token))
        return states[1:]

    patch(recurrent, "after_each", after_each)


@rule("depths from 1", MTP_EAGLE, "hybrid")
def depths_from_one(patch: Patch) -> None:
    """The first draft is proposed at depth 1."""
    right = proposals.proposal
    patch(proposals, "proposal", lambda depth, digest: right(depth + 1, digest))


@rule("thought of after each draft", PARD, "hybrid")
def after_the_draft(patch: Patch) -> None:
    """Drafts of one call are thought of one after the other, each after those that are returned before it."""

    def change(made: Any, of: Batch, row: Row, drafts: Any, config: Config) -> Any:
        reading, thoughts = row.text.reading(row.end + 1), []
        for depth, draft in enumerate(drafts.tokens):
            thoughts.append(proposals.proposal(depth, reading.digest))
            reading.read(draft)
        return thoughts or made

    edit(patch, proposals, "_of_row", change)


@rule("a placeholder is empty", EAGLE3, "hybrid")
def placeholders_are_empty(patch: Patch) -> None:
    """What was not drafted has no proposal, as where nothing was ever written."""
    patch(proposals, "NO_PROPOSAL", EMPTY)


@rule("dummies go another way", EAGLE3, "hybrid start-up")
def dummies_not_counted(patch: Patch) -> None:
    """Generations of nobody are not verified by proposals, and so not counted."""

    def change(fields: Fields, of: Batch, *_: Any) -> Fields:
        real = sum(row.request is not None for row in of.generations)
        return {**fields, "rejection_rows": real} if fields else fields

    edit(patch, proposals, "left", change)
