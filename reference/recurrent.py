"""Recurrent layers of a hybrid model: per request one state, of which all its tokens so far are a part.

A chain or a tree of drafts is run on from the state of what is cached; of the states on the way one is kept, that after
the last token that stands. Nothing else changes a state: no step that leaves its request out, no dummy, no draft that
was rejected. Then target and drafters say what they say without such layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from reference.batch import Batch, Row
from reference.history import History, Text
from reference.tree import ROOT
from reference.workers.interface import Fields
from scenarios.model import Config
from scenarios.tracer import RECURRENT_START, recurrent_state


def state(text: Text, length: int) -> int:
    """The state after the first ``length`` tokens."""
    rows = enumerate(text.tokens(0, length))
    return reduce(lambda before, row: recurrent_state(before, *row), rows, RECURRENT_START)


def after_each(row: Row) -> list[int]:
    """The state after each token fed: it goes on from that of the token before, in a tree from that of the parent."""
    cached = state(row.before, row.past)
    states: list[int] = []
    for token, position, parent in zip(row.tokens, row.positions, row.parents, strict=True):
        before = cached if parent == ROOT else states[parent]
        states.append(recurrent_state(before, position, token))
    return states


def found(batch: Batch, config: Config) -> Fields:
    """What a forward finds in the slots of its rows; a prompt that begins does not ask, and a dummy has no slot."""
    if not config.recurrent:
        return {}
    return {"ssm_states": [state(row.before, row.past) if _real(row) and row.past else None for row in batch.rows]}


def on_the_way(batch: Batch, config: Config) -> Fields:
    """The states that a forward has made of each generation, one per token that it was fed."""
    if not config.recurrent:
        return {}
    return {"intermediate_ssm_states": [after_each(row) if _real(row) else None for row in batch.generations]}


def left(batch: Batch, phase: str, config: Config) -> Fields:
    """What is in the slots of the rows once the worker is done: the state after the last token that is cached.

    Contexts write theirs themselves, so that a batch without generations promotes nothing; how often that was done a
    replay does not tell. The slot of dummies is as it always was.
    """
    if not config.recurrent:
        return {}
    promoted = {} if phase == "replay" else {"update_mamba_states": int(bool(batch.generations))}
    states = [state(row.text, row.end) if _real(row) else None for row in batch.rows]
    return {"ssm_states": states, "sentinel_state": RECURRENT_START} | promoted


def kept(histories: Mapping[int, History], config: Config) -> Fields:
    """The states of these requests, whether or not they were in the last batch."""
    if not config.recurrent:
        return {}
    states = {i: state(history.text, history.past) for i, history in histories.items()}
    return {"recurrent_states": states, "sentinel_state": RECURRENT_START}


def _real(row: Row) -> bool:
    return row.request is not None
