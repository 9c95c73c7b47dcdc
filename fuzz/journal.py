"""The case that is running, on disk before it runs: the death of a process loses nothing.

Each process has one file, on which it holds a lock for as long as it lives; the file is empty while no case runs.
The lock tells the living from the dead, where a process id could belong to another process by now.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuzz.files import HOME, not_writable
from scenarios import Scenario, scenario_from_json, scenario_to_json

_BEGIN: Final = b'{"engine": '
"""How the text of every case begins."""


@dataclass(frozen=True)
class Case:
    """A scenario on its way through an engine; ``bug`` is the defect that was seeded, None without one."""

    engine: str
    device: str
    bug: str | None
    scenario: Scenario


class Journal:
    """The file of this process. Creates it, and its folder; raises ``UsageError`` where that is not possible."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = False
        self._noted = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _locked(path)
        except OSError as error:
            raise not_writable(HOME, path.parent.parent, error) from error

    @contextmanager
    def case(self, case: Case) -> Iterator[None]:
        """Note the case before the block and forget it after, unless the process dies in between or it is kept.

        Cases inside the block are not noted: what it is about is the outer one, which is being judged or shrunk. But
        each is a sign of life, by the time at which the file was changed.
        """
        if self._held:
            os.utime(self._file)
            yield
            return
        value = {
            "engine": case.engine,
            "device": case.device,
            "bug": case.bug,
            "scenario": scenario_to_json(case.scenario),
        }
        self._note(json.dumps(value).encode())
        self._held = True
        try:
            yield
        finally:
            if self._held:
                self._held = False
                self._note(b"")

    def keep(self) -> None:
        """Have the case that is noted outlive its block: until the next one is noted, which may be the same."""
        self._held = False

    def _note(self, text: bytes) -> None:
        if text == self._noted:
            return
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)
        self._noted = text

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _locked(path: Path) -> int:
    """A descriptor of ``path`` that holds its lock."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(file, fcntl.LOCK_EX)
        # A sweep may have removed the new, still unlocked file; a lock on it would protect nothing.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file)):
            return file
        os.close(file)


def is_journal(path: Path) -> bool:
    """Whether the file can be that of a process: a regular one, empty or with a case, which may be cut short.

    Raises ``OSError`` for a file that is gone, or that may not be read.
    """
    if not path.is_file():
        path.lstat()
        return False  # a pipe would be waited for
    with path.open("rb") as file:
        begin = file.read(len(_BEGIN))
    return _BEGIN.startswith(begin)


def read_case(path: Path) -> Case | None:
    """The case in a journal; None if it is empty or cut short, for then the case had not begun."""
    try:
        value = json.loads(path.read_text())
        return Case(value["engine"], value["device"], value["bug"], scenario_from_json(value["scenario"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def sweep(folder: Path, keep: Callable[[Case], None]) -> None:
    """Remove the journals of dead processes, after ``keep`` has been given the case that each was running.

    What is no journal, or may not be opened, stays: ``Store.misplaced`` names it.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            if not is_journal(path):
                continue
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        else:
            case = read_case(path)
            if case is not None:
                keep(case)
            path.unlink()
        finally:
            os.close(file)
