"""Eagle3 in one model: linear drafting from captured hidden states of the target."""

from reference.workers.linear import LinearWorker


class Eagle3OneModelWorker(LinearWorker):
    """Is fed what ``apply_eagle3_fc`` makes of the captured layers, then what its draft model hands on."""

    name = "Eagle3OneModelWorker"
    feeds_hidden_states = True


WORKER = Eagle3OneModelWorker()
