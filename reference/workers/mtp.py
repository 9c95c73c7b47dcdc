"""Vanilla MTP: K layers, one call each, every layer looking one token further than the one before."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from reference.batch import Batch, Row
from reference.drafter import Chain, chain
from reference.history import Drafts, History
from reference.workers.interface import DraftCall, Drafting, SpecWorker
from scenarios.tracer import EMPTY, entry


class MTPWorker(SpecWorker):
    """Feeds a context its prompt and a generation its last K cached tokens, at the same positions in every layer.

    Layer i is given, at position x, the token of x + 1 + i and the hidden state of x + i; beyond what is known
    these are the drafts of the layers before and their hidden states. Generations are as long as what is cached
    after the step, in all layers and from then on; contexts stay contexts.
    """

    name = "MTPWorker"

    def draft(self, batch: Batch) -> Drafting:
        """K calls. What dummies are fed, and so what is drafted for them, depends on what their slots held before.

        Where a suffix automaton takes over, the layers agree with the target: what they drafted themselves stays in
        their caches, and the K rows of the next step replace no more of it than what was not accepted.
        """
        agrees = [batch.draft_len if row.overridden else row.agree for row in batch.rows]
        chains = [
            chain(row.text, row.end + 1, batch.draft_len, agree, row.near)
            for row, agree in zip(batch.rows, agrees, strict=True)
        ]
        return Drafting(
            calls=[self._look(batch, chains, i) for i in range(batch.draft_len)],
            drafts=[Drafts(made.drafts) for made in chains],
            kv_lens=[length(row, batch.draft_len) for row in batch.rows],
            open=batch.has_dummies,
        )

    def _look(self, batch: Batch, chains: list[Chain], i: int) -> DraftCall:
        spans = [span(row, batch.draft_len) for row in batch.rows]
        fed = [given(*row, i) for row in zip(batch.rows, chains, spans, strict=True)]
        return DraftCall(
            input_ids=None if batch.has_dummies else [token for tokens, _ in fed for token in tokens],
            position_ids=[position for positions in spans for position in positions],
            seq_lens=[len(positions) for positions in spans],
            kv_lens=[length(row, batch.draft_len) for row in batch.rows],
            num_contexts=batch.num_contexts,
            hidden_states=None if batch.has_dummies else [state for _, hidden in fed for state in hidden],
        )

    def announced(self, batch: Batch) -> int:
        """One token of each generation is not counted: its layers feed the last K."""
        return batch.draft_len

    def kept(self, histories: Mapping[int, History]) -> dict[str, Any]:
        """A cache per layer, and the last Kmax cached tokens with the target's hidden states."""
        return {
            "draft_layers_kv": {i: layers(history) for i, history in histories.items()},
            "mtp_past_tokens": {i: history.text.tokens(*last(history)) for i, history in histories.items()},
            "mtp_past_hidden_states": {i: history.text.hidden(*last(history)) for i, history in histories.items()},
        }


def last(history: History) -> tuple[int, int]:
    """Where the last Kmax cached tokens start and stop: as many as each of its turns drafts."""
    return history.past - len(history.drafts.tokens), history.past


def span(row: Row, draft_len: int) -> range:
    """Positions that the layers look from: a whole prompt, or the last K that are cached after the step."""
    return range(row.past if row.is_context else row.end - draft_len, row.end)


def length(row: Row, draft_len: int) -> int:
    """KV length that the layers see: what is cached after the step, of a generation at least its K rows.

    Upstream's clamp; it never bites where prompts have K tokens.
    """
    return row.end if row.is_context else max(row.end, draft_len)


def given(row: Row, made: Chain, positions: range, i: int) -> tuple[list[int], list[int]]:
    """Tokens and hidden states that layer ``i`` is given at these positions, the last of which is ``row.end - 1``."""
    tokens = row.text.tokens(positions.start + 1, row.end + 1) + made.drafts
    hidden = row.text.hidden(positions.start, row.end) + made.hidden
    return tokens[i : i + len(positions)], hidden[i : i + len(positions)]


def layers(history: History) -> list[list[int]]:
    """Slots of each layer: at n the token of n + 1 + i, of which the last ones are drafts of the last turn."""
    past, unwritten = history.past, skipped(history)
    tokens = history.text.tokens(0, past + 1) + list(history.drafts.own)
    return [
        [EMPTY if n in unwritten else entry(n, tokens[n + 1 + i]) for n in range(past)]
        for i in range(len(history.drafts.tokens))
    ]


def skipped(history: History) -> set[int]:
    """Positions that no layer ever looks from: K rows leave out the first of K + 1 accepted tokens."""
    starts = accumulate((turn.cached for turn in history.turns), initial=0)
    turns = list(zip(starts, history.turns, strict=False))[1:]
    return {start for start, turn in turns if turn.cached > len(turn.drafts.tokens)}


WORKER = MTPWorker()
