"""Eagle3 with a dynamic tree of drafts."""

from reference.batch import Batch
from reference.workers.interface import Fields
from reference.workers.tree import TreeWorker


class Eagle3OneModelDynamicTreeWorker(TreeWorker):
    """Is fed what ``apply_eagle3_fc`` makes of the captured layers, then what its draft model hands on."""

    name = "Eagle3OneModelDynamicTreeWorker"

    def spec_metadata(self, batch: Batch) -> Fields:
        """All tokens are captured; of a generation its root alone is counted."""
        fed = sum(batch.seq_lens)
        return {"spec_num_tokens": fed - batch.width * len(batch.generations), "num_capture_tokens": fed}


WORKER = Eagle3OneModelDynamicTreeWorker()
