"""Guided decoding: what the matcher of each request has read (upstream: ``CapturableGuidedDecoder``).

A request has a matcher that starts with the end of the prompt; a dummy has none. Between two steps it has read what
is generated and cached, all that has been emitted but the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from reference.batch import Batch, Row
from reference.history import Drafts, History
from reference.workers.interface import Fields
from scenarios.model import Config
from scenarios.trace import ENTERED, RESTORED
from scenarios.tracer import GRAMMAR_START, grammar_state


def matchers(histories: Mapping[int, History], config: Config) -> Fields:
    """The matchers of these requests, where decoding is guided."""
    if not config.guided_decoding:
        return {}
    read = {i: history.text.tokens(history.prompt_len, history.past) for i, history in histories.items()}
    return {"matchers": {i: _matcher(tokens) for i, tokens in read.items()}}


def matcher_rows(
    batch: Batch, config: Config, substep: str, drafts: Sequence[Drafts] | None = None, call: int = 0
) -> Fields:
    """The matchers of the rows at a sub-step, where decoding is guided; before draft call ``call`` by these ``drafts``.

    The target's forward makes them read all that it is fed. The first draft takes back what was rejected of it, so
    before the second call and from then on they have read the tokens that the calls are fed; the last one takes back
    all of these.
    """
    if not config.guided_decoding:
        return {}
    rows: list[list[int] | None] = []
    for i, row in enumerate(batch.rows):
        if row.request is None or row.end < row.prompt_len:
            rows.append(None)
        elif drafts and call:
            fed = [row.accepted[-1], *drafts[i].tokens[: call - 1]]
            rows.append(_matcher(row.text.tokens(row.prompt_len, row.end) + fed))
        else:
            rows.append(_matcher(_read(row, substep)))
    return {"matcher_rows": rows}


def _read(row: Row, substep: str) -> list[int]:
    """What a matcher has read before a forward, after it, and in it up to the first draft."""
    if substep == RESTORED:
        return row.text.tokens(row.prompt_len, row.end)
    cached = row.text.tokens(row.prompt_len, row.past)
    return cached if substep == ENTERED or row.is_context else cached + row.tokens


def _matcher(tokens: Sequence[int]) -> list[int]:
    """How many tokens a matcher has read, and its state then."""
    return [len(tokens), reduce(grammar_state, tokens, GRAMMAR_START)]
