"""Snapshots: what a person sees, kept as files. ``SNAPSHOTS=write`` writes them anew."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "snapshots"

Snapshot = Callable[[str, str], None]


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """``snapshot(name, text)`` compares a text with the file of that name; folders of this run are left out."""

    def compare(name: str, text: str) -> None:
        text = re.sub(r"[ \t]+$", "", text.replace(str(tmp_path), "TMP"), flags=re.MULTILINE)
        path = FOLDER / f"{name}.txt"
        if os.environ.get("SNAPSHOTS") == "write":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text

    return compare


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text on every machine."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
