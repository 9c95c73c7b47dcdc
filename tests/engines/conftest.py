"""Engines compute with torch: without it their tests are skipped, whichever are asked for."""

from __future__ import annotations

import pytest


def pytest_pycollect_makemodule() -> None:
    """Ahead of the import of each module."""
    pytest.importorskip("torch", reason="engines need torch")
