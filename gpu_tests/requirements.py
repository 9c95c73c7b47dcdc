"""Reasons for which a GPU test may skip: what the machine lacks and nobody asked for."""

from __future__ import annotations

from typing import Final

NO_SUCH_OPTION: Final = "this torch has no such option"
ONE_GPU: Final = "needs 2 GPUs"
"""Allowed as long as ``--require-gpus`` is 1."""
