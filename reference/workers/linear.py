"""The linear draft loop that Eagle3, MTP-Eagle and DraftTarget share (upstream: ``_forward_linear_draft_loop``)."""

from __future__ import annotations

from typing import ClassVar

from reference.batch import Batch, Row
from reference.drafter import Chain, chain, shifted_slots
from reference.history import Drafts, History
from reference.workers.interface import DraftCall, Drafting, SpecWorker
from scenarios.tracer import PRIME


class LinearWorker(SpecWorker):
    """Drafts one token per call, each call fed with the draft of the one before.

    The first call ingests the step's tokens in the target's layout, each position with the token of the next
    one; the later ones feed one token per row, so that by call i a row has its cached tokens and i more. A drafter that
    reads the target's cache has nothing to ingest: each of its calls feeds one token per row.
    """

    looks_ahead = 1
    feeds_hidden_states: ClassVar[bool]
    """Whether its draft model is fed hidden states. It is then told the ranks' counts; else the metadata shows them."""

    def draft(self, batch: Batch) -> Drafting:
        """K calls; one without drafts for K = 0 (PR #16888 tells of what happens to drafters that skip it)."""
        chains = [chain(row.text, row.end + 1, batch.draft_len, row.model_agree, row.near) for row in batch.rows]
        calls = [self._ingest(batch)]
        calls += [self._extend(batch, chains, i) for i in range(1, batch.draft_len)]
        if batch.shares_target_kv:
            calls = [self._look(batch, chains, i) for i in range(batch.draft_len)]
        kv_lens = [row.end + batch.draft_len for row in batch.rows]
        return Drafting(calls, [Drafts(made.drafts) for made in chains], kv_lens)

    def _ingest(self, batch: Batch) -> DraftCall:
        return DraftCall(
            input_ids=[token for row in batch.rows for token in shifted(row)],
            position_ids=batch.position_ids,
            seq_lens=batch.seq_lens,
            kv_lens=batch.kv_lens,
            num_contexts=batch.num_contexts,
            hidden_states=[h for row in batch.rows for h in row.hidden] if self.feeds_hidden_states else None,
            rank_counts=batch.tokens_of_ranks(self.announced(batch) if self.feeds_hidden_states else batch.width + 1),
            takes_rank_counts=self.feeds_hidden_states,
            shows_rank_counts=not self.feeds_hidden_states,
        )

    def _extend(self, batch: Batch, chains: list[Chain], i: int) -> DraftCall:
        return DraftCall(
            input_ids=[made.drafts[i - 1] for made in chains],
            position_ids=[row.end + i - 1 for row in batch.rows],
            seq_lens=[1] * len(batch.rows),
            kv_lens=[row.end + i for row in batch.rows],
            num_contexts=0,
            updated=True,
            use_spec_decoding=False,
            hidden_states=[made.hidden[i - 1] for made in chains] if self.feeds_hidden_states else None,
            rank_counts=batch.rows_of_ranks(),
            takes_rank_counts=self.feeds_hidden_states,
            shows_rank_counts=not self.feeds_hidden_states,
        )

    def _look(self, batch: Batch, chains: list[Chain], i: int) -> DraftCall:
        """A call over the target's cache: it adds nothing, so that neither lengths nor positions move.

        What it is handed on is a pair: the target's digest of all tokens fed by then, and the one that it began with,
        by which the drafter counts its steps.
        """
        rows = list(zip(batch.rows, chains, strict=True))
        first = [row.text.hidden(row.end - 1, row.end)[0] for row in batch.rows]
        digests = [made.hidden[i - 1] for made in chains] if i else first
        return DraftCall(
            input_ids=[made.drafts[i - 1] if i else shifted(row)[row.end - row.past - 1] for row, made in rows],
            position_ids=[row.end for row in batch.rows],
            seq_lens=[1] * len(rows),
            kv_lens=[row.end for row in batch.rows],
            num_contexts=0,
            use_spec_decoding=False,
            hidden_states=[[digest, begun + i * PRIME] for digest, begun in zip(digests, first, strict=True)],
            rank_counts=batch.rows_of_ranks(),
            shows_rank_counts=True,
        )

    def draft_slots(self, history: History) -> list[int]:
        """Each cached position with the token of the next one."""
        return shifted_slots(history)


def shifted(row: Row) -> list[int]:
    """Ids that the first call feeds for a row: for each position fed to the target, the token of the next one.

    A context ends with the next prompt token (PR #18295) or, after the prompt, the accepted token. A generation
    feeds what the target chose at each of its tokens, accepted or not; relaxed acceptance leaves only the accepted ones
    of them, with ones behind.
    """
    if row.is_context:
        return [*row.tokens[1:], row.text.token(row.end)]
    return row.choices if row.relaxed is None else row.accepted + [1] * (row.query - len(row.accepted))
