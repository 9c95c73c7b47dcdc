"""Eagle3 with a dynamic tree of drafts."""

from dataclasses import replace

from reference.batch import Batch
from reference.workers.interface import DraftCall, Fields
from reference.workers.tree import TreeWorker


class Eagle3OneModelDynamicTreeWorker(TreeWorker):
    """Is fed what ``apply_eagle3_fc`` makes of the captured layers, then what its draft model hands on."""

    name = "Eagle3OneModelDynamicTreeWorker"

    def announced(self, batch: Batch) -> int:
        """Of a generation its root alone is counted."""
        return 1

    def counted(self, call: DraftCall, batch: Batch, layer: int) -> DraftCall:
        """The target's counts, then one token per sequence, however many nodes a layer feeds; no argument."""
        counts = batch.rows_of_ranks() if layer else batch.tokens_of_ranks(batch.width + 1)
        return replace(call, rank_counts=counts, shows_rank_counts=True)

    def spec_metadata(self, batch: Batch) -> Fields:
        """All tokens are captured."""
        return super().spec_metadata(batch) | {"num_capture_tokens": sum(batch.seq_lens)}


WORKER = Eagle3OneModelDynamicTreeWorker()
