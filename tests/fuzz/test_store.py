"""State on disk: whole or absent, readable by a later run, never in anybody's way."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.events import CampaignStarted, Event, Events, HarnessError
from fuzz.journal import Case, Journal
from fuzz.store import Store, Totals
from fuzz.subject import read_subject
from scenarios import UsageError, finding_loads
from tests.fuzz.samples import FINDING, FOUND, MIXED, events


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def test_home_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFUZZ_HOME", "/somewhere")
    assert Store().home == Path("/somewhere")
    monkeypatch.delenv("SPECFUZZ_HOME")
    assert Store().home == Path(".specfuzz")


def test_a_finding_is_kept_and_found_again(store: Store) -> None:
    path = store.save(FINDING)
    assert path == store.home / "findings" / f"{FINDING.id}.json"
    assert finding_loads(path.read_text()) == FINDING
    assert store.find(FINDING.id) == path
    assert store.findings() == [path]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_findings_under_a_seeded_defect_are_kept_apart(store: Store) -> None:
    seeded = replace(FINDING, bug="TRT-03/MTPEagleWorker")
    path = store.save(seeded)
    assert store.findings() == []
    assert store.find(seeded.id) == path


def test_findings_are_listed_oldest_first(store: Store) -> None:
    paths = [store.save(replace(FINDING, invariant=name)) for name in ("b", "a", "c")]
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (1000 - age, 1000 - age))
    assert store.findings() == paths


def test_what_is_no_file_among_the_findings_is_not_passed_over(store: Store) -> None:
    folder = store.save(FINDING).parent
    (folder / "folder.json").mkdir()
    (folder / "gone.json").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.json")
    assert {path.stem for path in store.findings()} == {FINDING.id, "folder", "gone", "pipe"}
    for name, reason in (("folder", "is no file"), ("gone", "cannot be read"), ("pipe", "is no file")):
        with pytest.raises(UsageError, match=f"{name}.json: {reason}.*; name a JSON file or the id of a finding"):
            read_subject(folder / f"{name}.json")


def test_an_unknown_id_gets_the_closest(store: Store) -> None:
    store.save(FINDING)
    near = FINDING.id[:-1] + "x"
    with pytest.raises(UsageError, match=f"is called {near!r}; did you mean {FINDING.id!r}"):
        store.find(near)


def test_a_campaign_is_recorded_as_it_goes(store: Store) -> None:
    stream = store.record(iter(events(FOUND)))  # type: ignore[arg-type]
    next(stream)
    assert store.totals() == Totals(campaigns=1, unfinished=1, cases=0, steps=0)
    next(stream)
    assert store.totals() == Totals(campaigns=1, unfinished=1, cases=10, steps=31)
    assert list(stream) == events(FOUND)[2:]
    assert store.totals() == Totals(campaigns=1, unfinished=0, cases=20, steps=62)
    assert store.findings() == [store.find(FINDING.id)]
    with closing(sqlite3.connect(store.home / "campaigns.sqlite")) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("SELECT command, seed, findings, seconds FROM campaign").fetchall() == [("run", 7, 1, 0.5)]
        assert db.execute("SELECT worker, slug, reached, held FROM invariant ORDER BY 1, 2").fetchall() == [
            ("MTPEagleWorker", "output-lossless", 31, 31),
            ("MTPEagleWorker", "restored-layout", 120, 120),
            ("PARDWorker", "output-lossless", 31, 31),
            ("PARDWorker", "restored-layout", 120, 120),
        ]


def test_a_campaign_that_is_refused_was_none(store: Store) -> None:
    def refused(before: list[Event]) -> Events:
        yield from before
        raise UsageError("--device: no cuda here")

    for before, booked in ((events()[:1], 0), (events()[:2], 1)):
        with pytest.raises(UsageError, match="no cuda here"):
            list(store.record(refused(before)))
        assert store.totals().campaigns == booked


def test_batches_of_one_worker_add_up_and_campaigns_stay_apart(store: Store) -> None:
    twice = events(workers=("PARDWorker", "PARDWorker"))
    error = HarnessError(worker="PARDWorker", key="k", message="m")
    for _ in range(2):
        list(store.record(iter([*twice[:-1], error, twice[-1]])))  # type: ignore[arg-type]
    assert store.totals() == Totals(campaigns=2, unfinished=0, cases=40, steps=124)


def test_a_case_of_a_dead_process_becomes_a_scenario_file(store: Store) -> None:
    journal = Journal(store.running / "1.json")
    with journal.case(Case("portable", "cpu", "TRT-01/MTPEagleWorker", MIXED)):
        text = journal.path.read_text()
    journal.close()
    (store.running / "1.json").write_text(text)
    (store.running / "2.json").write_text(text)
    # The same case twice is one file.
    (path,) = set(store.take_interrupted())
    read = read_subject(path)
    assert (read.scenario, read.engine, read.device, read.bug) == (MIXED, "portable", "cpu", "TRT-01/MTPEagleWorker")
    assert store.take_interrupted() == []
    assert store.interrupted() == [path] == [store.find(path.stem)]


def test_a_home_that_cannot_be_written_is_named() -> None:
    store = Store(Path("/proc/specfuzz"))
    start = iter([CampaignStarted(command="run", engine="e", device="cpu", workers=(), seed=0)])
    for use in (
        store.prepare,
        lambda: store.save(FINDING),
        lambda: list(store.record(start)),  # type: ignore[arg-type]
        store.totals,
    ):
        with pytest.raises(UsageError, match=r"^SPECFUZZ_HOME: /proc/specfuzz.* cannot be written"):
            use()


def test_a_database_that_is_none_is_named(store: Store) -> None:
    store.prepare()
    (store.home / "campaigns.sqlite").write_text("no database at all, and longer than a header of one" * 10)
    with pytest.raises(UsageError, match=r"campaigns.sqlite: file is not a database; move the file away"):
        store.totals()


@pytest.mark.parametrize("said", ["database or disk is full", "disk I/O error"])
def test_a_full_disk_is_no_fault_of_the_file(store: Store, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    def connect(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError(said)

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(UsageError, match=rf"{said}; free some space, or name another folder in SPECFUZZ_HOME$"):
        store.totals()


@pytest.mark.parametrize("folder", ["findings", "museum", "interrupted"])
def test_a_folder_that_cannot_be_read_is_named(store: Store, folder: str) -> None:
    store.prepare()
    (store.home / folder).write_text("no folder")
    with pytest.raises(UsageError, match=rf"^SPECFUZZ_HOME: .*/{folder} cannot be read \(Not a directory\); "):
        store.find("0123abcd")


def test_a_journal_that_cannot_be_read_is_named_and_one_that_is_gone_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.prepare()
    for name in ("gone.json", "locked.json"):
        (store.running / name).touch()

    def look(path: Path) -> bool:
        raise FileNotFoundError if path.name == "gone.json" else PermissionError(13, "Permission denied")

    monkeypatch.setattr("fuzz.store.is_journal", look)
    locked = store.running / "locked.json"
    assert store.misplaced() == [f"{locked}: cannot be read (Permission denied), and is passed over"]
