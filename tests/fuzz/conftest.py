"""Snapshots: what a person sees, kept as files. ``SNAPSHOTS=write`` writes them anew. Waiting for other processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuzz.alone import Caller, Here
from fuzz.executors import Executor, InProcess, Spawned
from museum import BUGS, Bug

FOLDER = Path(__file__).parent / "snapshots"

Snapshot = Callable[[str, str], None]
Eventually = Callable[[Callable[[], bool]], None]


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
def _state_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the snapshots have it."""
    monkeypatch.setenv("SPECFUZZ_HOME", str(tmp_path / "specfuzz-home"))


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text on every machine."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands spawn no process for what one does, which costs time and hides what a test has replaced.

    Unless the test is marked ``spawned``.
    """

    def executor(processes: int, running: Path) -> Executor:
        return InProcess(running) if processes == 1 else Spawned(processes, running)

    def caller() -> Caller:
        return Here()

    if request.node.get_closest_marker("spawned") is None:
        monkeypatch.setattr("fuzz.commands.executor", executor)
        monkeypatch.setattr("fuzz.alone.caller", caller)


@pytest.fixture
def empty_museum() -> Iterator[dict[str, Bug]]:
    """The register of seeded defects without any; afterwards with all of them, in the order that they had."""
    kept = dict(BUGS)
    BUGS.clear()
    yield BUGS
    BUGS.clear()
    BUGS.update(kept)


@pytest.fixture
def eventually() -> Eventually:
    """``eventually(holds)`` waits until it does, for as long as a machine with better things to do may need."""

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, "waited for 120 s in vain"
            time.sleep(0.02)

    return wait
