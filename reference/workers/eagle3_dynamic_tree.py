"""Eagle3 with a dynamic tree of drafts."""

from reference.workers.tree import TreeWorker


class Eagle3OneModelDynamicTreeWorker(TreeWorker):
    """Is fed what ``apply_eagle3_fc`` makes of the captured layers, then what its draft model hands on."""

    name = "Eagle3OneModelDynamicTreeWorker"


WORKER = Eagle3OneModelDynamicTreeWorker()
