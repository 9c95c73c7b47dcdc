"""Phases: what the executor may do next."""

from __future__ import annotations

from hypothesis import strategies as st

from scenarios import BACKENDS, Phase, Schedule, UsageError


def phases(schedule: Schedule, *, with_startup: bool = True) -> st.SearchStrategy[Phase]:
    """Phases that the next step may have: start-up until something is served, replay once a graph is captured.

    A backend without graphs has warm-up alone.
    Shrinks to an eager step. ``with_startup`` False leaves start-up out. Raises ``UsageError`` if the run is over.
    """
    if schedule.over:
        raise UsageError("phases(): the run of schedule is over; start a new one")
    return st.sampled_from(phase_table(schedule, with_startup=with_startup))


def replayable(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Graphs, (batch size, draft length, rows), for which there are generations; among several ranks dummies do too."""
    several = schedule.config.attention_dp_size > 1
    return [graph for graph in sorted(schedule.graphs) if several or graph[0] <= len(schedule.generating)]


def phase_table(schedule: Schedule, *, with_startup: bool = True) -> tuple[Phase, ...]:
    """Phases that the next step may have, as a table of five, simplest first; one listed twice is twice as likely.

    Always five, so that a step keeps its place among the choices when Hypothesis removes an earlier one.
    """
    if with_startup and not schedule.serving and BACKENDS[schedule.config.attention_backend].one_page:
        return (Phase.EAGER, Phase.WARMUP, Phase.WARMUP, Phase.WARMUP, Phase.EAGER)
    if with_startup and not schedule.serving:
        # Graphs that differ in the sum of their rows alone take several captures.
        last = Phase.CAPTURE if schedule.config.ragged_verify else Phase.EAGER
        return (Phase.EAGER, Phase.WARMUP, Phase.CAPTURE, Phase.CAPTURE, last)
    if replayable(schedule):
        return (Phase.EAGER, Phase.REPLAY, Phase.REPLAY, Phase.REPLAY, Phase.REPLAY)
    return (Phase.EAGER,) * 5
