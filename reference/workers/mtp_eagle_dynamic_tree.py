"""MTP-Eagle with a dynamic tree of drafts."""

from reference.batch import Batch
from reference.workers.interface import Fields
from reference.workers.tree import TreeWorker


class MTPEagleDynamicTreeWorker(TreeWorker):
    """Is fed the target's hidden states, then those of its MTP layer; copies the KV lengths and puts them back."""

    name = "MTPEagleDynamicTreeWorker"
    returns_kv_lens = True

    def spec_metadata(self, batch: Batch) -> Fields:
        """Its metadata class is Eagle3's, but counts each token."""
        return super().spec_metadata(batch) | {"num_capture_tokens": sum(batch.seq_lens)}


WORKER = MTPEagleDynamicTreeWorker()
