"""MTP-Eagle with a dynamic tree of drafts."""

from reference.workers.tree import TreeWorker


class MTPEagleDynamicTreeWorker(TreeWorker):
    """Is fed the target's hidden states, then those of its MTP layer; copies the KV lengths and puts them back."""

    name = "MTPEagleDynamicTreeWorker"
    returns_kv_lens = True


WORKER = MTPEagleDynamicTreeWorker()
