"""State between runs, in ``.specfuzz/`` or ``SPECFUZZ_HOME``.

findings/ID.json     findings, each written in one piece (temporary file, then rename)
museum/ID.json       the same for findings under a seeded defect, which say nothing of the engine as it is
running/NAME.json    the case that a process is running, see ``fuzz.journal``
interrupted/ID.json  cases whose process ended before a verdict, as scenario files
held/ID.json         those of them that have been replayed since, and held
campaigns.sqlite     one row per campaign, one per worker in it, one per invariant in that; the events of each sweep
                     that is not complete

A process may be killed at any moment: files are whole or absent, and a campaign without an end was cut short.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fuzz.events import (
    BatchFinished,
    CampaignFinished,
    CampaignStarted,
    Event,
    Events,
    FindingFound,
    Tally,
    decode,
    encode,
)
from fuzz.files import HOME, check_writable, json_files, not_writable, visible, write_text
from fuzz.journal import Case, is_journal, sweep
from scenarios import Finding, UsageError, closest, finding_to_json, scenario_to_json

_SCHEMA = """
CREATE TABLE IF NOT EXISTS campaign (
    id INTEGER PRIMARY KEY, command TEXT NOT NULL, engine TEXT NOT NULL, device TEXT NOT NULL, seed INTEGER NOT NULL,
    started REAL NOT NULL, seconds REAL, findings INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS worker (
    campaign INTEGER NOT NULL REFERENCES campaign, worker TEXT NOT NULL, cases INTEGER NOT NULL,
    steps INTEGER NOT NULL, seconds REAL NOT NULL, planned INTEGER NOT NULL, fired INTEGER NOT NULL,
    PRIMARY KEY (campaign, worker)
);
CREATE TABLE IF NOT EXISTS invariant (
    campaign INTEGER NOT NULL REFERENCES campaign, worker TEXT NOT NULL, slug TEXT NOT NULL,
    reached INTEGER NOT NULL, held INTEGER NOT NULL, PRIMARY KEY (campaign, worker, slug)
);
CREATE TABLE IF NOT EXISTS sweep (id INTEGER PRIMARY KEY, key TEXT NOT NULL, event TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS sweep_key ON sweep (key);
"""

_FOLDERS: Final = ("held", "interrupted", "museum", "findings")
"""Where names are looked up; later ones win."""


@dataclass(frozen=True)
class Totals:
    """All campaigns together. ``unfinished`` ones were cut short, or still run."""

    campaigns: int
    unfinished: int
    cases: int
    steps: int


class Store:
    """The state folder. Made when something is written first; ``UsageError`` if that cannot be."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or Path(os.environ.get(HOME) or ".specfuzz")
        self.running = self.home / "running"

    def prepare(self) -> None:
        """Raise ``UsageError`` unless the folder can be written."""
        for folder in (self.home, self.running):
            check_writable(folder, HOME)

    def misplaced(self) -> list[str]:
        """What a search passes over in the folder of journals, a sentence each: it is no journal, or locked away."""
        sentences = []
        for path in visible(self.running):
            try:
                if not is_journal(path) or path.suffix != ".json":
                    sentences.append(f"{path}: is no journal of a search, and is passed over; remove it")
            except FileNotFoundError:
                continue  # its process has just ended
            except OSError as error:
                sentences.append(f"{path}: cannot be read ({error.strerror}), and is passed over")
        return sentences

    def save(self, finding: Finding) -> Path:
        """Write a finding; returns its path."""
        folder = "findings" if finding.bug is None else "museum"
        return self._write(self.home / folder / f"{finding.id}.json", finding_to_json(finding))

    def findings(self) -> list[Path]:
        """Files of the findings in the engine as it is, oldest first; whatever else is called so is among them."""
        files = json_files(self.home / "findings")
        return sorted(files, key=lambda path: (path.lstat().st_mtime, path.name))

    def seeded(self) -> list[Path]:
        """Files of the findings under seeded defects."""
        return json_files(self.home / "museum")

    def find(self, id: str) -> Path:
        """File of the finding or interrupted case with this id; ``UsageError`` with the closest if there is none."""
        files = {p.stem: p for folder in _FOLDERS for p in json_files(self.home / folder)}
        if id not in files:
            raise UsageError(f"ID: no finding in {self.home} is called {id!r}; {closest(id, files)}")
        return files[id]

    def interrupted(self) -> list[Path]:
        """Scenario files of the cases that were running when their process ended."""
        return json_files(self.home / "interrupted")

    def let_go(self, path: Path) -> Path:
        """Move an interrupted case to those that have held since; returns its new path."""
        held = self.home / "held" / path.name
        try:
            held.parent.mkdir(exist_ok=True)
            os.replace(path, held)
        except OSError as error:
            raise not_writable(HOME, held.parent, error) from error
        return held

    def take_interrupted(self) -> list[Path]:
        """New scenario files, made of the cases that dead processes have left behind."""
        kept: list[Path] = []

        def keep(case: Case) -> None:
            """Write the case as a scenario file."""
            value = {
                "title": "Interrupted: a process ended in this case before its verdict",
                "engine": case.engine,
                "device": case.device,
                **({} if case.bug is None else {"bug": case.bug}),
                "scenario": scenario_to_json(case.scenario),
            }
            id = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
            kept.append(self._write(self.home / "interrupted" / f"{id}.json", value))

        sweep(self.running, keep)
        return kept

    def _write(self, path: Path, value: dict[str, Any]) -> Path:
        write_text(path, json.dumps(value, indent=1) + "\n", HOME)
        return path

    def record(self, events: Events) -> Events:
        """Pass the events of a campaign on, after what they say has been stored.

        One that turns out to be impossible here, and has done nothing, was none.
        """
        campaign = 0
        try:
            for event in events:
                if isinstance(event, CampaignStarted):
                    campaign = self._start(event)
                elif isinstance(event, BatchFinished):
                    self._add(campaign, event.worker, event.tally)
                elif isinstance(event, FindingFound):
                    self.save(event.finding)
                    self._execute("UPDATE campaign SET findings = findings + 1 WHERE id = ?", (campaign,))
                elif isinstance(event, CampaignFinished):
                    self._execute("UPDATE campaign SET seconds = ? WHERE id = ?", (event.seconds, campaign))
                yield event
        except UsageError:
            if campaign:
                self._withdraw(campaign)
            raise

    def totals(self) -> Totals:
        """What all campaigns have done."""
        with self._database() as db:
            campaigns, unfinished = db.execute("SELECT count(*), count(*) - count(seconds) FROM campaign").fetchone()
            cases, steps = db.execute("SELECT coalesce(sum(cases), 0), coalesce(sum(steps), 0) FROM worker").fetchone()
        return Totals(campaigns, unfinished, cases, steps)

    def note(self, key: str, event: Event) -> None:
        """Keep an event of the sweep of that key."""
        self._execute("INSERT INTO sweep (key, event) VALUES (?, ?)", (key, encode(event).decode()))

    def noted(self, key: str) -> list[Event]:
        """Events of the sweep of that key, oldest first."""
        with self._database() as db:
            rows = db.execute("SELECT event FROM sweep WHERE key = ? ORDER BY id", (key,)).fetchall()
        return [decode(text.encode()) for (text,) in rows]

    def forget(self, key: str) -> None:
        """Drop the events of the sweep of that key."""
        self._execute("DELETE FROM sweep WHERE key = ?", (key,))

    def _start(self, event: CampaignStarted) -> int:
        with self._database() as db:
            row = db.execute(
                "INSERT INTO campaign (command, engine, device, seed, started) VALUES (?, ?, ?, ?, ?)",
                (event.command, event.engine, event.device, event.seed, time.time()),
            )
        assert row.lastrowid is not None
        return row.lastrowid

    def _withdraw(self, campaign: int) -> None:
        self._execute(
            "DELETE FROM campaign WHERE id = ? AND findings = 0 AND id NOT IN (SELECT campaign FROM worker)",
            (campaign,),
        )

    def _add(self, campaign: int, worker: str, tally: Tally) -> None:
        with self._database() as db:
            db.execute(
                "INSERT INTO worker VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " cases = cases + excluded.cases, steps = steps + excluded.steps,"
                " seconds = seconds + excluded.seconds, planned = planned + excluded.planned,"
                " fired = fired + excluded.fired",
                (campaign, worker, tally.cases, tally.steps, tally.seconds, tally.planned, tally.fired),
            )
            db.executemany(
                "INSERT INTO invariant VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " reached = reached + excluded.reached, held = held + excluded.held",
                [(campaign, worker, slug, n, tally.held.get(slug, 0)) for slug, n in tally.reached.items()],
            )

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        with self._database() as db:
            db.execute(statement, values)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """A transaction. A connection lives as long as it, so that nothing is left open however a run ends."""
        path = self.home / "campaigns.sqlite"
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(path, timeout=30)) as db, db:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.executescript(_SCHEMA)
                yield db
        except OSError as error:
            raise not_writable(HOME, self.home, error) from error
        except sqlite3.DatabaseError as error:
            # Of a full disk SQLite says either "database or disk is full" or "disk I/O error".
            remedy = "move the file away, campaigns begin a new one"
            if "disk" in str(error):
                remedy = f"free some space, or name another folder in {HOME}"
            raise UsageError(f"{path}: {error}; {remedy}") from error
