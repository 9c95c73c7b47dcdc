"""What the engine ``tensorrt_llm`` drives, and which variable names its source.

Imports no torch, so that a campaign can be planned before an engine is loaded.
"""

from __future__ import annotations

from typing import Final

SOURCE_VARIABLE: Final = "SPECFUZZ_TRTLLM_SOURCE"
"""Names the checkout to drive; the environment carries it to every process."""

DRIVEN: Final = (
    "Eagle3OneModelWorker",
    "MTPEagleWorker",
    "DraftTargetOneModelWorker",
    "PARDWorker",
    "MTPWorker",
    "DFlashWorker",
    "MTPEagleDynamicTreeWorker",
)
"""Workers that the suite has a driver for."""

DRIVEN_BACKENDS: Final = ("TRTLLM", "DSA")
"""Attention backends, keys of ``scenarios.BACKENDS``, whose metadata class the suite has a driver for."""
