"""MTP-Eagle: one MTP layer drafts, fed with the target's hidden states and then with its own."""

from __future__ import annotations

from engines.portable.speculative.eagle3 import Eagle3OneModelWorker


class MTPEagleWorker(Eagle3OneModelWorker):
    """The worker of mode MTP_EAGLE_ONE_MODEL; its loop is the base's, which the mode steers."""
