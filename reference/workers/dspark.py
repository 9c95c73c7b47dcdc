"""DSpark: DFlash whose block starts with the first draft, corrected by a head of its own."""

from reference.workers.dflash import DFlashWorker


class DSparkWorker(DFlashWorker):
    """Drafts from the row of the last accepted token on, so that its block is as wide as the longest draft."""

    name = "DSparkWorker"
    leading_rows = 0


WORKER = DSparkWorker()
