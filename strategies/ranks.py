"""What the other ranks of attention data parallelism have in a step, and when this one is idle or padded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from scenarios import Config, Peer, Phase, ScenarioError, Schedule, Step, kept_in_step
from strategies.choices import Draw, choose, digits, pick
from strategies.layout import Room

PEERS: Final = (
    Peer(generations=1),
    Peer(),
    Peer(contexts=(5,)),
    Peer(generations=3),
    Peer(contexts=(3,), generations=2),
    Peer(contexts=(1, 6), generations=1),
    Peer(contexts=(40,)),
    Peer(generations=8),
)
"""Batches of other ranks, simplest first; one that is too large for an engine is cut."""

_IDLE: Final = 6
"""This rank is idle in one of so many steps."""
_STILL_IDLE: Final = 3
"""The same of steps after one with dummies, which are the same objects then."""
_PRESSES: Final = 2
"""The same of steps in which the dummy would take the room of a page whose content is known."""


def draw_idle(draw: Draw, schedule: Schedule, draft_len: int, last: Step | None) -> Step | None:
    """A step in which this rank has nothing to do and another one has; None mostly, and where no dummy fits.

    last  the step before, if there is one
    """
    if schedule.config.attention_dp_size == 1:
        return None
    padded = last is not None and any(row.request is None for row in last.generations)
    room = Room(schedule, draft_len)
    one_in = _PRESSES if room.presses else _STILL_IDLE if padded or any(room.known) else _IDLE
    if pick(draw, one_in) < one_in - 1:
        return None
    return _if_possible(schedule, draw_peers(draw, schedule, Step(draft_len=draft_len)))


def draw_peers(draw: Draw, schedule: Schedule, step: Step, graphs: Collection[int] = ()) -> Step:
    """A served ``step`` beside batches of the other ranks; of several graphs it may get the dummies that one needs.

    graphs  batch sizes that could be replayed
    """
    config = schedule.config
    others = config.attention_dp_size - 1
    if not others:
        return step
    if graphs and not step.contexts:
        padded = _draw_padded(draw, schedule, step, graphs)
        if padded is not None:
            return padded
    if step.phase is Phase.REPLAY:
        least = digits(draw, (len(step.generations) + 1,) * others)
        return replace(step, peers=tuple(Peer(generations=len(step.generations) - n) for n in least))
    peers = [_cut(PEERS[i], config, step.draft_len) for i in digits(draw, (len(PEERS),) * others)]
    if not step.rows and not any(peer.contexts or peer.generations for peer in peers):
        peers[0] = PEERS[0]
    return kept_in_step(config, replace(step, peers=tuple(peers)))


def _draw_padded(draw: Draw, schedule: Schedule, step: Step, graphs: Collection[int]) -> Step | None:
    """A replay of some of the rows in a graph that is as large as another rank's batch; None without dummies."""
    kept = step.generations[: len(step.generations) - pick(draw, len(step.generations) + 1)]
    larger = [size for size in graphs if size > len(kept)]
    if not larger:
        return None
    size = choose(draw, larger)
    sizes = digits(draw, (size + 1,) * (schedule.config.attention_dp_size - 1))
    peers = (Peer(generations=size), *(Peer(generations=n) for n in sizes[1:]))
    padded = replace(step, phase=Phase.REPLAY, generations=kept, peers=peers)
    return _if_possible(schedule, kept_in_step(schedule.config, padded))


def _if_possible(schedule: Schedule, step: Step) -> Step | None:
    """``step`` if it can come next: its dummies may find no page."""
    try:
        schedule.plan(step)
    except ScenarioError:
        return None
    return step


def _cut(peer: Peer, config: Config, draft_len: int) -> Peer:
    """``peer`` within the limits of an engine; never empty unless it was."""
    fed = config.tokens_per_gen_step(draft_len)
    generations = min(peer.generations, config.max_num_requests, config.max_num_tokens // fed)
    chunks = tuple(_chunks(peer, config.max_num_requests - generations, config.max_num_tokens - generations * fed))
    return Peer(contexts=chunks, generations=generations)


def _chunks(peer: Peer, rows: int, tokens: int) -> Iterator[int]:
    for chunk in peer.contexts[:rows]:
        if tokens:
            yield min(chunk, tokens)
            tokens -= min(chunk, tokens)
