"""PARD: all drafts of a step in one call, over mask tokens."""

from __future__ import annotations

from reference.batch import Batch, Row
from reference.drafter import rollout, unshifted_slots
from reference.history import Drafts, History
from reference.workers.interface import DraftCall, Drafting, SpecWorker
from scenarios.tracer import MASK_TOKEN


class PARDWorker(SpecWorker):
    """Feeds each token at its own position: a context its chunk, a generation what it accepted, then masks.

    The 2K tokens of a generation lie one position beyond those that the target was fed, so its KV length is
    one more during the call. Afterwards it is what the next target forward of that width would find. Contexts
    get no drafts; their length does not move.
    """

    name = "PARDWorker"
    saves_kv_lens = True

    def draft(self, batch: Batch) -> Drafting:
        """One call, which for a batch of contexts only fills the drafter's cache."""
        context_kv = [row.kv for row in batch.contexts]
        fed = [(row.tokens, row.positions) for row in batch.contexts]
        fed += [(masked(row), list(range(row.past + 1, row.kv + 1))) for row in batch.generations]
        call = DraftCall(
            input_ids=[token for tokens, _ in fed for token in tokens],
            position_ids=[position for _, positions in fed for position in positions],
            seq_lens=batch.seq_lens,
            kv_lens=context_kv + [row.kv + 1 for row in batch.generations],
            num_contexts=batch.num_contexts,
            updated=True,
        )
        drafts = [Drafts(rollout(row.text, row.end + 1, batch.draft_len, row.model_agree)) for row in batch.generations]
        return Drafting(
            calls=[call],
            drafts=[Drafts() for _ in batch.contexts] + drafts,
            kv_lens=context_kv + [row.kv + len(row.accepted) for row in batch.generations],
        )

    def draft_slots(self, history: History) -> list[int]:
        """Each cached token, but for the first generated one: a context step has no room for it."""
        return unshifted_slots(history)


def masked(row: Row) -> list[int]:
    """Ids that the draft call feeds for a generation: the accepted tokens, then masks."""
    return row.accepted + [MASK_TOKEN] * (row.query - len(row.accepted))


WORKER = PARDWorker()
