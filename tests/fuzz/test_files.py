"""Files are whole or absent, and nobody writes over what somebody else is writing."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from fuzz.files import check_writable, json_files, not_writable, unique, write_text
from scenarios import UsageError


def test_names_differ_between_hosts_processes_and_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {unique(), unique()}
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    names.add(unique())
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names.add(unique())
    assert len(names) == 4
    assert unique().startswith("elsewhere-1-")


def test_nothing_is_left_beside_a_file_however_writing_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "one", "--output")
    assert path.read_text() == "one"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "two", "--output")
    assert [p.read_text() for p in path.parent.iterdir()] == ["one"]


def test_a_folder_is_made_and_nothing_left_in_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "--report-dir")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^--report-dir: .*/file cannot be written \(File exists\); name a folder"):
        check_writable(tmp_path / "file", "--report-dir")


def test_a_full_disk_needs_space_or_another_folder() -> None:
    error = not_writable("SPECFUZZ_HOME", Path("home"), OSError(errno.ENOSPC, "No space left on device"))
    assert str(error).endswith("(No space left on device); free some space, or name another folder")


def test_json_files_of_a_folder(tmp_path: Path) -> None:
    assert json_files(tmp_path / "missing") == []
    for name in ("b.json", "a.json", ".hidden.json", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in json_files(tmp_path)] == ["a.json", "b.json"]
