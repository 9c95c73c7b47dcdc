"""MTP-Eagle in one model: linear drafting over one MTP layer, from the target's last hidden states."""

from reference.workers.linear import LinearWorker


class MTPEagleWorker(LinearWorker):
    """Is fed the target's hidden states, then those of its MTP layer."""

    name = "MTPEagleWorker"
    feeds_hidden_states = True
    tells_sequences = True
    shares_experts = True


WORKER = MTPEagleWorker()
