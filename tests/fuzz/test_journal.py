"""Left-over journals tell what dead processes were doing; those of the living are left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuzz.journal import Case, Journal, read_case, sweep
from scenarios import UsageError
from tests.fuzz.samples import MIXED

CASE = Case("portable", "cpu", "TRT-01/MTPEagleWorker", MIXED)


def swept(folder: Path) -> list[Case]:
    kept: list[Case] = []
    sweep(folder, kept.append)
    return kept


def test_a_case_is_noted_while_its_block_runs(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "running" / "1.json")
    assert read_case(journal.path) is None
    with journal.case(CASE):
        assert read_case(journal.path) == CASE
    assert read_case(journal.path) is None
    # A shorter case after a longer one leaves nothing of it.
    short = Case("portable", "cpu", None, MIXED)
    with journal.case(short):
        assert read_case(journal.path) == short
    journal.close()
    assert not journal.path.exists()


def test_a_case_is_forgotten_when_its_block_fails(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "1.json")
    with pytest.raises(KeyError), journal.case(CASE):
        raise KeyError
    assert read_case(journal.path) is None
    journal.close()


def test_the_living_are_left_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "1.json")
    with journal.case(CASE):
        assert swept(tmp_path) == []
        assert journal.path.exists()
    journal.close()


def test_the_dead_are_swept_up(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "1.json")
    with journal.case(CASE):
        text = journal.path.read_text()
    journal.close()
    (tmp_path / "2.json").write_text(text)
    (tmp_path / "3.json").write_text("")  # between two cases
    (tmp_path / "4.json").write_text(text[: len(text) // 2])  # cut short: the case had not begun
    (tmp_path / "5.json").write_text('{"engine": "portable"}')
    (tmp_path / "6.json").write_bytes(b'{"engine": \xff\xfe')
    assert swept(tmp_path) == [CASE]
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_a_sweep_took_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    path = tmp_path / "1.json"
    lock = fcntl.flock

    def swept_first(file: int, operation: int) -> None:
        monkeypatch.undo()
        path.unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    journal = Journal(path)
    with journal.case(CASE):
        assert read_case(path) == CASE
    journal.close()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(UsageError, match=r"^SPECFUZZ_HOME: /proc/specfuzz cannot be written \(.*\); name a folder"):
        Journal(Path("/proc/specfuzz/running/1.json"))


def test_a_case_under_judgement_is_not_replaced_by_those_run_for_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "1.json")
    smaller = Case("portable", "cpu", None, MIXED)
    with journal.case(CASE):
        with journal.case(smaller):
            assert read_case(journal.path) == CASE
        assert read_case(journal.path) == CASE
    assert read_case(journal.path) is None
    with journal.case(smaller):
        assert read_case(journal.path) == smaller
    journal.close()


def test_a_case_that_is_run_for_another_is_a_sign_of_life(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "1.json")
    with journal.case(CASE):
        os.utime(journal.path, (0, 0))
        with journal.case(CASE):
            assert journal.path.stat().st_mtime > 0
    journal.close()


def test_a_sweep_passes_over_what_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "scenario.json").write_text('{"version": 1}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    before = sorted(tmp_path.iterdir())
    assert swept(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_sweep_passes_over_what_it_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.json").touch()

    def look(path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr("fuzz.journal.is_journal", look)
    assert swept(tmp_path) == []
    assert (tmp_path / "1.json").exists()


def test_a_case_that_is_nested_too_deeply_is_none(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"engine": ' + "[" * 100_000)
    assert swept(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_case_that_is_kept_is_noted_until_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "1.json")
    with journal.case(CASE):
        journal.keep()
    assert read_case(journal.path) == CASE
    with journal.case(CASE):
        assert read_case(journal.path) == CASE
    assert read_case(journal.path) is None
    journal.close()
