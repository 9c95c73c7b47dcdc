"""Eagle3 in one model: linear drafting from captured hidden states of the target."""

from reference.batch import Batch
from reference.workers.interface import Fields
from reference.workers.linear import LinearWorker


class Eagle3OneModelWorker(LinearWorker):
    """Is fed what ``apply_eagle3_fc`` makes of the captured layers, then what its draft model hands on."""

    name = "Eagle3OneModelWorker"
    feeds_hidden_states = True
    tells_sequences = True

    def announced(self, batch: Batch) -> int:
        """Upstream takes off the longest draft, not the step's, so the count may be negative; no experts go by it."""
        return batch.width + 1 - batch.max_draft_len

    def spec_metadata(self, batch: Batch) -> Fields:
        """All tokens are captured."""
        return super().spec_metadata(batch) | {"num_capture_tokens": sum(batch.seq_lens)}


WORKER = Eagle3OneModelWorker()
