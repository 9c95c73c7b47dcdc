"""DraftTarget in one model: linear drafting by a separate draft model, from tokens alone."""

from reference.workers.linear import LinearWorker


class DraftTargetOneModelWorker(LinearWorker):
    """Is fed tokens and positions only. In graph warm-up its KV lengths move on a clone."""

    name = "DraftTargetOneModelWorker"
    saves_kv_lens = True
    feeds_hidden_states = False


WORKER = DraftTargetOneModelWorker()
