"""Eagle3 in one model: linear drafting from captured hidden states of the target."""

from reference.batch import Batch
from reference.workers.interface import Fields
from reference.workers.linear import LinearWorker


class Eagle3OneModelWorker(LinearWorker):
    """Is fed what ``apply_eagle3_fc`` makes of the captured layers, then what its draft model hands on."""

    name = "Eagle3OneModelWorker"
    feeds_hidden_states = True

    def spec_metadata(self, batch: Batch) -> Fields:
        """All tokens are captured; of a generation those beyond the longest draft are not counted, whatever K is."""
        fed = sum(batch.seq_lens)
        left = fed - batch.max_draft_len * len(batch.generations)
        return {"spec_num_tokens": left, "num_capture_tokens": fed}


WORKER = Eagle3OneModelWorker()
