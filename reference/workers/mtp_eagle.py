"""MTP-Eagle in one model: linear drafting over one MTP layer, from the target's last hidden states."""

from reference.batch import Batch
from reference.workers.interface import Fields
from reference.workers.linear import LinearWorker


class MTPEagleWorker(LinearWorker):
    """Is fed the target's hidden states, then those of its MTP layer."""

    name = "MTPEagleWorker"
    feeds_hidden_states = True
    tells_sequences = True
    shares_experts = True

    def spec_metadata(self, batch: Batch) -> Fields:
        """Its metadata class is Eagle3's, but counts each token."""
        return super().spec_metadata(batch) | {"num_capture_tokens": sum(batch.seq_lens)}


WORKER = MTPEagleWorker()
