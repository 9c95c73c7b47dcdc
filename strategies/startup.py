"""Steps of start-up, with dummies only: general warm-up at some shape, and the capture of one graph."""

from __future__ import annotations

from scenarios import Context, Generation, Phase, Schedule, Step
from strategies.acceptance import least_agreement
from strategies.choices import Draw, choose, digits
from strategies.drafting import draw_agreements
from strategies.layout import Room
from strategies.sizes import GRAPHS, SHAPES, fitting_shape, least_draft_len, prompt_lens
from strategies.widths import draw_widths


def most_dummies(room: Room) -> int:
    """How many dummy generations fit side by side."""
    most = 0
    while room.longest_past(most) >= room.config.least_history:
        most += 1
    return most


def draw_dummies(draw: Draw, schedule: Schedule, phase: Phase, draft_len: int) -> Step | None:
    """A step of start-up with that draft length, or the smallest if it is too much; None if no dummy fits at all.

    Warm-up has any small shape, or as many generations as fit; a graph is captured for 1, 2, 3 or as many. Where
    generations differ in their rows, graphs of one shape may differ in the sum of these, and often do.
    """
    wanted = choose(draw, GRAPHS if phase is Phase.CAPTURE else SHAPES)
    if phase is Phase.CAPTURE and schedule.config.ragged_verify:
        size, draft_len, _ = choose(draw, [(max(2, wanted[1]), draft_len, 0), *sorted(schedule.graphs)])
        wanted = 0, size
    room = Room(schedule, draft_len)
    most = most_dummies(room)
    if not most:
        draft_len = least_draft_len(schedule.config)
        room = Room(schedule, draft_len)
        most = most_dummies(room)
    if not most:
        return None
    most_contexts = min(2, room.tokens) if phase is Phase.WARMUP and room.takes_prompt else 0
    contexts, generations = fitting_shape(wanted, most_contexts, most, room.rows)
    rows = _draw_generations(draw, room, draft_len, generations)
    return Step(phase=phase, draft_len=draft_len, contexts=_draw_contexts(draw, room, contexts), generations=rows)


def _draw_contexts(draw: Draw, room: Room, size: int) -> tuple[Context, ...]:
    rows = []
    for later in range(size - 1, -1, -1):
        most = min(room.longest_prompt, room.tokens - later)
        if most >= room.least_prompt:
            chunk = choose(draw, prompt_lens(room.config, most))
            room.start(chunk)
            room.take(chunk)
            rows.append(Context(request=None, chunk=chunk))
    return tuple(rows)


def _draw_generations(draw: Draw, room: Room, draft_len: int, size: int) -> tuple[Generation, ...]:
    if not size:
        return ()
    longest, least = room.longest_past(), room.config.least_history
    wanted = (least, *prompt_lens(room.config, longest)) if longest > least else (least,)
    # A dummy has no tree of drafts.
    drafts = 0 if room.config.traits.tree else draft_len
    accept = [1 + a for a in draw_agreements(draw, drafts, size, least_agreement(room.config, drafts))]
    widths = draw_widths(draw, room.config, draft_len, size)
    rows: list[Generation] = []
    for later, i in zip(range(size - 1, -1, -1), digits(draw, (len(wanted),) * size)):
        past = min(wanted[i], room.longest_past(later))
        room.start_dummy(past)
        verify = widths[len(rows)]
        accepted = accept[len(rows)] if verify is None else min(accept[len(rows)], 1 + verify)
        rows.append(Generation(request=None, past=past, accept=accepted, verify=verify))
    return tuple(rows)
