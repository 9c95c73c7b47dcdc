"""DraftTarget in one model: linear drafting by a separate draft model, from tokens alone."""

from reference.batch import Batch
from reference.workers.linear import LinearWorker


class DraftTargetOneModelWorker(LinearWorker):
    """Is fed tokens and positions only. In graph warm-up its KV lengths move on a clone."""

    name = "DraftTargetOneModelWorker"
    saves_kv_lens = True
    feeds_hidden_states = False
    shares_experts = True

    def announced(self, batch: Batch) -> int:
        """Of a generation the drafts to verify are not counted; draft calls go by what the attention metadata shows."""
        return batch.width + 1 - batch.draft_len


WORKER = DraftTargetOneModelWorker()
