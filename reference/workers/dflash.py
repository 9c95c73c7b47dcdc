"""DFlash: all drafts of a step in one block, from a context that the drafter keeps for each request itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from reference.batch import Batch
from reference.drafter import columns, rollout
from reference.history import Drafts, History
from reference.workers.interface import DraftCall, Drafting, Fields, SpecWorker
from scenarios.tracer import MASK_TOKEN


class DFlashWorker(SpecWorker):
    """Keeps a column for each cached token of a request, and queries them with one block of rows per generation.

    A block is the last accepted token, then masks: as wide as the longest draft and one row more, whatever the
    draft length, since its first row drafts nothing. The counters of the metadata keep to the rows of the target,
    as the draft model asks neither them nor the KV cache. With draft length 0 the columns grow all the same.
    """

    name = "DFlashWorker"
    saves_kv_lens = True
    leading_rows: ClassVar[int] = 1
    """Rows of a block ahead of the first draft's."""

    def draft(self, batch: Batch) -> Drafting:
        """One call, none without generations or drafts; what it drafts for a dummy is not specified."""
        rollouts = [
            Drafts(rollout(row.text, row.end + 1, batch.draft_len, row.model_agree)) for row in batch.generations
        ]
        drafts = [*(Drafts() for _ in batch.contexts), *rollouts]
        if not batch.draft_len:
            return Drafting([], drafts, batch.kv_lens, open=batch.has_dummies)
        kv_lens = [row.kv for row in batch.contexts] + [row.kv + len(row.accepted) for row in batch.generations]
        return Drafting([self._block(batch)] if batch.generations else [], drafts, kv_lens, open=batch.has_dummies)

    def _block(self, batch: Batch) -> DraftCall:
        """The query of every generation behind what the step has added to its context."""
        width = self.leading_rows + batch.max_draft_len
        rows = batch.generations
        ends = [row.end for row in rows]
        return DraftCall(
            input_ids=[token for row in rows for token in [row.accepted[-1], *[MASK_TOKEN] * (width - 1)]],
            position_ids=None if batch.has_dummies else [x for end in ends for x in range(end, end + width)],
            seq_lens=[row.query for row in batch.contexts] + [1 + batch.max_draft_len] * len(rows),
            counted=batch.seq_lens,
            kv_lens=[row.kv for row in batch.contexts] + [row.kv + 1 for row in rows],
            num_contexts=batch.num_contexts,
            num_ctx_per_req=None if batch.has_dummies else ends,
            updated=True,
        )

    def spec_metadata(self, batch: Batch) -> Fields:
        """Each token is captured and counted."""
        return super().spec_metadata(batch) | {"num_capture_tokens": sum(batch.seq_lens)}

    def own_state(self, batch: Batch, *, after: bool) -> Fields:
        """Columns of each generation: its cached tokens, however many of them a step has added."""
        if batch.has_dummies:
            return {}
        return {"ctx_len": [row.end if after else row.past for row in batch.generations]}

    def kept(self, histories: Mapping[int, History]) -> Fields:
        """A column for each cached token; the drafter has no use for the pages that it is granted."""
        return super().kept(histories) | {"draft_context": {i: columns(history) for i, history in histories.items()}}


WORKER = DFlashWorker()
