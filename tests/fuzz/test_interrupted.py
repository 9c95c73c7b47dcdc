"""Cases that were running when their process ended: listed until they have been replayed whole, and hold."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fuzz import cli
from fuzz.journal import Case, Journal
from fuzz.store import Store
from tests.fuzz.samples import MIXED

Capture = pytest.CaptureFixture[str]


def fake(engine: str) -> tuple[str, str]:
    return "--engine", f"tests.fuzz.fakes:{engine}"


def document(capsys: Capture) -> Any:
    return json.loads(capsys.readouterr().out)


def leave_behind(engine: str, bug: str | None = None) -> None:
    """A case of that engine, as a process that was killed leaves it behind."""
    store = Store()
    with closing(Journal(store.running / "1.json")) as journal:
        with journal.case(Case(f"tests.fuzz.fakes:{engine}", "cpu", bug, MIXED)):
            text = journal.path.read_text()
    (store.running / "2.json").write_text(text)


def interrupt(engine: str, bug: str | None = None) -> Path:
    """An interrupted case of that engine, in the store."""
    leave_behind(engine, bug)
    [path] = Store().take_interrupted()
    return path


def test_an_interrupted_case_that_holds_is_let_go(capsys: Capture) -> None:
    path = interrupt("Sound")
    held = path.parent.parent / "held" / path.name
    # By its id or its path.
    assert cli.invoke(["replay", path.stem, *fake("Sound")]) == 0
    line = f"interrupted before, and holds: no longer listed, and kept as {held}\n"
    assert capsys.readouterr().out.endswith(line)
    assert (path.exists(), held.exists(), Store().interrupted()) == (False, True, [])
    assert cli.invoke(["replay", path.stem, *fake("Sound")]) == 0
    assert line not in capsys.readouterr().out
    assert interrupt("Sound") == path
    assert cli.invoke(["replay", str(path), *fake("Sound"), "--json"]) == 0
    assert document(capsys)["held"] == [str(held)]


def test_what_a_killed_process_left_behind_is_named_at_once(capsys: Capture) -> None:
    leave_behind("Sound")
    assert cli.invoke(["replay"]) == 2
    [path] = Store().interrupted()
    line = f"not run here, interrupted: a process ended in this case before its verdict: specfuzz replay {path}"
    assert line in capsys.readouterr().out
    assert cli.invoke(["replay", "--json"]) == 2
    assert document(capsys)["interrupted"] == [str(path)]


@pytest.mark.parametrize(
    ("engine", "bug", "arguments"),
    [
        ("Forgetful", None, fake("Forgetful")),  # violates
        ("Silent", None, fake("Silent")),  # proves nothing
        ("Forgetful", None, fake("Sound")),  # another engine
        ("Sound", "TRT-01/MTPEagleWorker", fake("Sound")),  # without its defect
        ("Sound", None, [*fake("Sound"), "--invariant", "output-lossless"]),  # not all that it was asked
    ],
)
def test_an_interrupted_case_that_was_not_replayed_whole_stays(
    engine: str, bug: str | None, arguments: list[str], capsys: Capture
) -> None:
    path = interrupt(engine, bug)
    cli.invoke(["replay", str(path), *arguments, "--json"])
    assert document(capsys)["held"] == []
    assert Store().interrupted() == [path]


@pytest.mark.spawned
def test_an_interrupted_case_that_ends_its_process_stays(capsys: Capture) -> None:
    path = interrupt("Quitting")
    assert cli.invoke(["replay", str(path), *fake("Quitting"), "--json"]) == 1
    assert document(capsys)["held"] == []
    assert Store().interrupted() == [path]
