"""What the draft models of ``scenarios.tracer`` say, as functions of a request's own tokens.

``known`` counts the tokens that the drafter knows when it starts: all that are cached plus the next one. What it
was given agrees with them, and where it was given nothing it sees the target's cache, so its digest is that of
these tokens whatever the shift; a right hidden state adds up to the same digest and leaves the choice unchanged.
A sparse drafter scores the same tokens at the same places as the target, so it selects what the target would.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.history import History, Text
from scenarios.tracer import EMPTY, GRAMMAR_START, choose, disagree, entry, grammar_state, guided, near, term


class Chain(NamedTuple):
    """Drafts made one call after the other, and the hidden state that each call returns."""

    drafts: list[int]
    hidden: list[int]


def chain(text: Text, known: int, draft_len: int, agree: int, close: int = 0) -> Chain:
    """Drafts of a loop that is fed its own drafts: each continues the known tokens and the drafts before it.

    A grammar masks them as it does the target's choices, but in the middle of a prompt, where it has no matcher.
    """
    masked = text.guides(known - 1)
    state = text.matched(known) if masked else GRAMMAR_START
    drafts: list[int] = []
    hidden: list[int] = []
    reading = text.reading(known)
    for depth in range(draft_len):
        hidden.append(reading.digest)
        draft = drafted(choose(reading.digest), depth, agree, close)
        drafts.append(guided(draft, state) if masked else draft)
        state = grammar_state(state, drafts[-1])
        reading.read(drafts[-1])
    return Chain(drafts, hidden)


def rollout(text: Text, known: int, draft_len: int, agree: int) -> list[int]:
    """Drafts of one call over mask tokens: what the target itself would say next, disturbed only afterwards.

    No grammar masks them, neither one by one nor what the drafter believes to come next.
    """
    continuation: list[int] = []
    reading = text.reading(known)
    for _ in range(draft_len):
        continuation.append(choose(reading.digest))
        reading.read(continuation[-1])
    return [drafted(token, depth, agree) for depth, token in enumerate(continuation)]


def drafted(choice: int, depth: int, agree: int, close: int = 0) -> int:
    """What the draft head returns at ``depth``: the target's choice as far as the drafter is to agree with it.

    The ``close`` drafts after these are its second choice.
    """
    if depth < agree:
        return choice
    return near(choice) if depth < agree + close else disagree(choice)


def columns(history: History) -> list[list[int]]:
    """A context of a drafter's own: per cached token its position and what it adds to the target's digest."""
    return [[n, term(n, slot)] for n, slot in enumerate(history.text.slots(history.past))]


def shifted_slots(history: History) -> list[int]:
    """Draft slots of a drafter with shift 1: each position holds the token of the next one."""
    past = history.past
    return list(map(entry, range(past), history.text.tokens(1, past + 1)))


def unshifted_slots(history: History) -> list[int]:
    """Draft slots of a drafter with shift 0 that is never given the first generated token."""
    slots = history.text.slots(history.past)
    if len(slots) > history.prompt_len:
        slots[history.prompt_len] = EMPTY
    return slots
