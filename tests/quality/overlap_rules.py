"""Wrong rules of the oracle about the overlap scheduler."""

from __future__ import annotations

from dataclasses import replace

from museum.bug import EAGLE3, Patch
from reference import executor, overlap
from reference.batch import Batch, Row
from tests.quality.wrong_rules import edit, rule

Continued = tuple[int, overlap.OverlappedRow | None]


@rule("the coming width is supposed", EAGLE3, "overlapped")
def coming_width(patch: Patch) -> None:
    """The host adds the rows of the coming step to what is known, not those of the step in flight."""
    patch(overlap.OverlappedRow, "host_past", property(lambda self: self.known + self.width))


@rule("a prompt is known whole", EAGLE3, "overlapped")
def prompt_known(patch: Patch) -> None:
    """The first token after a prompt is not among those that a step in flight may accept."""

    def change(found: Continued, row: Row, last: Batch) -> Continued:
        index, guess = found
        return index, replace(guess, known=guess.known + 1) if guess and last.rows[index].is_context else guess

    edit(patch, overlap, "_continued", change)


@rule("positions go up by drafts", EAGLE3, "overlapped")
def drafts_alone(patch: Patch) -> None:
    """Positions are corrected by the drafts that were accepted, without the target's own token."""
    patch(overlap.OverlappedRow, "position_offset", property(lambda self: self.accepted - 1))


@rule("ledgers without the next grant", EAGLE3, "overlapped")
def next_grant_later(patch: Patch) -> None:
    """Managers are updated for a step before the next one is granted its tokens."""
    right = executor._held
    patch(executor, "_held", lambda histories, launched=None: right(histories))


@rule("the step in flight is known", EAGLE3, "overlapped")
def nothing_in_flight(patch: Patch) -> None:
    """The host knows what the last step accepted, as it does without the overlap scheduler."""
    patch(overlap, "_continued", lambda row, last: (-1, None))
