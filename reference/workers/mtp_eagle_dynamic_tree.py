"""MTP-Eagle with a dynamic tree of drafts."""

from dataclasses import replace

from reference.batch import Batch
from reference.workers.interface import DraftCall, Fields
from reference.workers.tree import TreeWorker


class MTPEagleDynamicTreeWorker(TreeWorker):
    """Is fed the target's hidden states, then those of its MTP layer; copies the KV lengths and puts them back."""

    name = "MTPEagleDynamicTreeWorker"
    returns_kv_lens = True

    def counted(self, call: DraftCall, batch: Batch, layer: int) -> DraftCall:
        """The announced counts, then the nodes that a layer feeds for each sequence; also as an argument."""
        counts = batch.rows_of_ranks(layer * batch.topk) if layer else batch.tokens_of_ranks(self.announced(batch))
        return replace(call, rank_counts=counts, shows_rank_counts=True, takes_rank_counts=True)

    def spec_metadata(self, batch: Batch) -> Fields:
        """Its metadata class is Eagle3's, but counts each token."""
        return super().spec_metadata(batch) | {"num_capture_tokens": sum(batch.seq_lens)}


WORKER = MTPEagleDynamicTreeWorker()
