"""The ledger of known failures: tests that fail, why, and the issue or pull request that says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import pytest

from gpu_tests.requirements import KNOWN_CRASH

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings this one
    import tomli as tomllib  # type: ignore[no-redef, import-not-found, unused-ignore]

FILE: Final = "known_failures.toml"
_KEYS: Final = {"test": str, "reference": str, "reason": str, "crash": bool}
_REFERENCE: Final = re.compile(r"#\d+")


@dataclass(frozen=True)
class KnownFailure:
    """An entry.

    test       pattern of node ids, relative to the folder of the ledger: ``test_graphs.py::test_replays*[*DSA*]``;
               a bracket stands for itself
    reference  an issue or a pull request, with its number: ``TensorRT-LLM #16382``
    reason     one sentence
    crash      the test would take its process with it, so it is never launched
    """

    test: str
    reference: str
    reason: str
    crash: bool = False

    def matches(self, node: str) -> bool:
        """Whether the test of that id, relative to the folder, is meant."""
        return fnmatchcase(node, self.test.replace("[", "[[]"))

    def mark(self) -> pytest.MarkDecorator:
        """What becomes of the test: its failure is expected and its success is none, or it is not launched."""
        why = f"{self.reference}: {self.reason}"
        if self.crash:
            return pytest.mark.skip(reason=f"{KNOWN_CRASH}: {why}")
        return pytest.mark.xfail(reason=why, strict=True)


def read(path: Path) -> list[KnownFailure]:
    """The entries of a ledger; none if there is no such file. ``pytest.UsageError`` names what is wrong with one."""
    if not path.exists():
        return []
    try:
        entries = tomllib.loads(path.read_text()).get("known", [])
    except tomllib.TOMLDecodeError as error:
        raise pytest.UsageError(f"{path.name}: {error}") from None
    return [_entry(entry, f"{path.name}: known[{i}]") for i, entry in enumerate(entries)]


def _entry(entry: dict[str, Any], where: str) -> KnownFailure:
    for key, value in entry.items():
        if key not in _KEYS:
            raise pytest.UsageError(f"{where}: {key!r} is not a field; write {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]):
            raise pytest.UsageError(f"{where}: {key} is no {_KEYS[key].__name__}")
    absent = [key for key in ("test", "reference", "reason") if not entry.get(key)]
    if absent:
        raise pytest.UsageError(f"{where}: {absent[0]} is missing")
    if not _REFERENCE.search(entry["reference"]):
        raise pytest.UsageError(
            f"{where}: reference {entry['reference']!r} names no issue; write one with its number, like #16382"
        )
    return KnownFailure(**entry)


def apply(entries: Sequence[KnownFailure], items: Sequence[pytest.Item], folder: Path) -> list[KnownFailure]:
    """Mark the tests that the ledger knows; returns the entries that none of them matches."""
    unused = []
    for entry in entries:
        known = [item for item in items if entry.matches(_node(item, folder))]
        for item in known:
            item.add_marker(entry.mark())
        if not known:
            unused.append(entry)
    return unused


def _node(item: pytest.Item, folder: Path) -> str:
    if not item.path.is_relative_to(folder):
        return ""
    return "::".join([item.path.relative_to(folder).as_posix(), *item.nodeid.split("::")[1:]])
