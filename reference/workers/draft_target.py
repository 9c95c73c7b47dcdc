"""DraftTarget in one model: linear drafting by a separate draft model, from tokens alone."""

from reference.batch import Batch
from reference.workers.interface import Fields
from reference.workers.linear import LinearWorker


class DraftTargetOneModelWorker(LinearWorker):
    """Is fed tokens and positions only. In graph warm-up its KV lengths move on a clone."""

    name = "DraftTargetOneModelWorker"
    saves_kv_lens = True
    feeds_hidden_states = False

    def spec_metadata(self, batch: Batch) -> Fields:
        """Of a generation the drafts to verify are not counted."""
        return {"spec_num_tokens": sum(batch.seq_lens) - batch.draft_len * len(batch.generations)}


WORKER = DraftTargetOneModelWorker()
