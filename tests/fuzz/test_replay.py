"""Scenario files, stories and findings run again."""

from __future__ import annotations

import json
import subprocess
import sys
from bdb import BdbQuit
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz.replay import replay
from fuzz.store import Store
from fuzz.subject import Subject, find_subject, read_subject
from museum import BUGS, Bug
from scenarios import UsageError, Violation, finding_to_json, scenario_to_json
from tests.fuzz import fakes
from tests.fuzz.samples import FINDING, MIXED


def write(folder: Path, value: Any) -> Path:
    path = folder / "file.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def subject(engine: str = "Sound", **fields: Any) -> Subject:
    return Subject(name="it", scenario=MIXED, engine=f"tests.fuzz.fakes:{engine}", **fields)


def test_a_bare_scenario(tmp_path: Path) -> None:
    path = write(tmp_path, scenario_to_json(MIXED))
    assert read_subject(path) == Subject(name=str(path), scenario=MIXED)


def test_a_scenario_with_a_story(tmp_path: Path) -> None:
    texts = {"title": "A bug", "story": "How it was found.", "bug": "TRT-01/MTPEagleWorker"}
    path = write(tmp_path, {**texts, "scenario": scenario_to_json(MIXED)})
    read = read_subject(path, "name")
    assert read == Subject(name="name", scenario=MIXED, **texts)  # type: ignore[arg-type]
    # That a file is about a defect does not seed it.
    assert read.active_bug is None
    assert read.on(None, None, seed_bug=True).active_bug == "TRT-01/MTPEagleWorker"


def test_a_finding_is_run_as_it_was_found(tmp_path: Path) -> None:
    seeded = replace(FINDING, bug="TRT-01/MTPEagleWorker")
    read = read_subject(write(tmp_path, finding_to_json(seeded)))
    assert read.finding == seeded
    assert (read.engine, read.device, read.active_bug) == (FINDING.engine, "cpu", "TRT-01/MTPEagleWorker")
    assert read_subject(write(tmp_path, finding_to_json(FINDING))).active_bug is None


def test_files_and_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "home")
    store.save(FINDING)
    assert find_subject(FINDING.id, store).finding == FINDING
    path = write(tmp_path, scenario_to_json(MIXED))
    assert find_subject(str(path), store).scenario == MIXED
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text(path.read_text())
    assert find_subject("plain", store).scenario == MIXED
    for missing in ("other.json", "some/file"):
        with pytest.raises(UsageError, match=rf"^{missing}: cannot be read \(No such file or directory\); name a JSON"):
            find_subject(missing, store)


BARE = scenario_to_json(MIXED)
FOUND = finding_to_json(FINDING)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("{", "is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[]", "holds a list; write a JSON object"),
        ({**BARE, "version": 9}, "version: is 9; this release reads version 1"),
        ({**BARE, "stpes": []}, "stpes: is not a field; did you mean 'steps'?"),
        ({"versoin": 1, "config": {}}, "versoin: is not a field; did you mean 'version'?"),
        ({"scenaroi": BARE}, "scenaroi: is not a field; did you mean 'scenario'?"),
        ('{"steps": [], "steps": [1]}', "steps: is there twice; leave one of them out"),
        (f'{{"version": {"9" * 5000}}}', "has a number of 5000 digits; write one of at most 64 bits"),
        ({"title": "x", "story": "y"}, "scenario: is missing; add it beside 'title', with the scenario in it"),
        ({**BARE, "story": "y"}, "scenario: is missing; add it beside 'story', with the scenario in it"),
        ("\ufeff{}", "begins with a byte-order mark; save it without a BOM"),
        ({"scenario": BARE, "titel": "x"}, "titel: is not a field; did you mean 'title'?"),
        ({"scenario": BARE, "bug": 3}, "bug: is not a text; write a text"),
        ({"scenario": 3}, "scenario: is not an object; write an object"),
        ({"scenario": {**BARE, "steps": []}}, "scenario.steps: is empty; add a step"),
        ({**FOUND, "scenario": {**BARE, "steps": []}}, "scenario.steps: is empty; add a step"),
        ({k: v for k, v in FOUND.items() if k != "violation"}, "violation: is missing; add it"),
        ({**FOUND, "violation": {"invariant": "x"}}, "violation.step: is missing; add it"),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_field(tmp_path: Path, value: Any, error: str) -> None:
    path = write(tmp_path, value)
    with pytest.raises(UsageError) as caught:
        read_subject(path)
    assert str(caught.value).startswith(f"{path}: {error}")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"cannot be read \(is not text\)"):
        read_subject(path)


def test_a_device_that_an_engine_does_not_have_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(device: str) -> Any:
        raise UsageError(f"device: no {device} here; write 'cpu'")

    monkeypatch.setattr(fakes, "Sound", engine)
    with pytest.raises(UsageError, match="^--device: no cuda here; write 'cpu'$"):
        replay(subject().on("tests.fuzz.fakes:Sound", "cuda"))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(UsageError, match=r"has 300 MiB, which is too much; name one of less than 64 MiB$"):
        read_subject(path)


def test_another_engine_or_defect() -> None:
    moved = subject().on("portable", "cuda", bug="TRT-04/MTPEagleWorker", seed_bug=True)
    assert (moved.engine, moved.device, moved.active_bug) == ("portable", "cuda", "TRT-04/MTPEagleWorker")
    # A finding under a defect stays under it.
    kept = subject(bug="TRT-04/MTPEagleWorker", seeded=True).on("tests.fuzz.fakes:Sound", "cpu")
    assert kept.active_bug == "TRT-04/MTPEagleWorker"
    # What a file names is not imported.
    with pytest.raises(UsageError, match=r"^it: engine: 'antigravity:fly' is not one of this suite's; write --engine "):
        Subject(name="it", scenario=MIXED, engine="antigravity:fly").on(None, None)
    with pytest.raises(UsageError, match="--engine: no engine is called 'porta'"):
        subject().on("porta", None)
    with pytest.raises(UsageError, match=r"^--with-bug: it names no defect; write one, see `specfuzz list bugs`$"):
        subject().on(None, None, seed_bug=True)


def test_what_holds_holds() -> None:
    done = replay(subject())
    assert done.status == 0
    assert done.finding is None
    assert done.reached > 20
    assert done.to_json() == {
        "name": "it",
        "engine": "tests.fuzz.fakes:Sound",
        "device": "cpu",
        "bug": None,
        "holds": True,
        "reached": done.reached,
        "problem": None,
        "violations": [],
        "recorded": None,
    }


def test_what_a_finding_was_found_with_is_told_whether_it_holds_or_not() -> None:
    for engine, status in (("Sound", 0), ("Forgetful", 1)):
        done = replay(subject(engine, finding=FINDING))
        assert done.status == status
        assert done.to_json()["recorded"] == {
            "engine": "tests.fuzz.fakes:Forgetful",
            "device": "cpu",
            "bug": None,
            "violation": FOUND["violation"],
            "raised_at": "speculative/mtp.py:12",
            "seen_on": None,
        }


def test_what_fails_shows_the_invariant_that_was_found() -> None:
    first = replay(subject("Forgetful"))
    assert first.status == 1
    assert first.finding is not None
    other = next(v.invariant for v in first.violations if v.invariant != first.finding.invariant)
    again = replay(subject("Forgetful", finding=replace(FINDING, invariant=other)))
    assert again.finding is not None
    assert again.finding.invariant == other
    gone = replay(subject("Forgetful", finding=replace(FINDING, invariant="output-lossless")))
    assert gone.finding is not None
    assert gone.finding.invariant == first.finding.invariant
    assert first.to_json()["holds"] is False
    assert first.to_json()["violations"][0]["field"] == "num_contexts"


def test_only_what_is_named_is_asked() -> None:
    done = replay(subject("Forgetful"), only=("output-lossless",))
    assert done.status == 0
    assert done.reached == 1


def test_a_fault_that_does_not_fire_proves_nothing() -> None:
    done = replay(subject("Silent"))
    assert done.status == 2
    assert done.to_json()["problem"] == "steps[0]: the planned fault draft_model.forward@2:oom did not fire"
    assert done.to_json()["holds"] is False


def test_a_defect_is_seeded_for_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(patch: Any) -> None:
        patch(fakes.Sound, "tamper", fakes.Forgetful.tamper)

    monkeypatch.setitem(BUGS, "TRT-03/Fake", Bug("TRT-03/Fake", "K2", "MTPEagleWorker", "t", "r", (), forget))
    done = replay(subject(bug="TRT-03/Fake", seeded=True))
    assert done.finding is not None
    assert done.finding.bug == "TRT-03/Fake"
    assert replay(subject(bug="TRT-03/Fake")).status == 0


def test_defects_belong_to_the_portable_engine() -> None:
    upstream = Subject(name="it", scenario=MIXED, engine="tensorrt_llm", bug="TRT-01/MTPEagleWorker", seeded=True)
    with pytest.raises(UsageError, match=r"^--with-bug: defects are seeded into the portable engine"):
        replay(upstream)


def death(engine: str) -> Subject:
    violation = Violation(invariant="process-survives", step=0, message="the process was killed by SIGKILL")
    finding = replace(FINDING, engine=f"tests.fuzz.fakes:{engine}", invariant="process-survives", violation=violation)
    return subject(engine, finding=finding)


def test_a_death_is_replayed_in_a_process_of_its_own() -> None:
    done = replay(death("Dying"))
    assert [v.message for v in done.violations] == ["the process was killed by SIGSEGV"]
    assert done.verdict is None
    assert done.reached == 0
    assert done.finding is not None
    assert done.finding.invariant == "process-survives"


def test_a_death_that_does_not_repeat_is_verified_like_anything_else() -> None:
    done = replay(death("Sound"))
    assert done.status == 0
    assert done.reached > 20


@pytest.mark.exhaustive
def test_a_hang_is_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.replay.STALL_SECONDS", 1.0)
    done = replay(death("Hanging"))
    assert [v.message for v in done.violations] == ["the process did not end within 1 s"]


def test_a_breakpoint_stops_a_replay_in_this_process(tmp_path: Path) -> None:
    path = write(tmp_path, scenario_to_json(MIXED))
    command = [sys.executable, "-m", "fuzz", "replay", str(path), "--engine", "tests.fuzz.fakes:Stopping", "--here"]
    # No relation, which would stop in twins too.
    command += ["--invariant", "restored-layout"]
    text = "p len(step.contexts) + 41\nc\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "(Pdb) 42\n" in done.stdout
    assert f"{path}: holds, 1 invariant " in done.stdout


def test_to_quit_the_debugger_is_to_quit_and_without_a_terminal_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def quit_at_once() -> None:
        raise BdbQuit

    monkeypatch.setattr(sys, "breakpointhook", quit_at_once)
    with pytest.raises(KeyboardInterrupt):
        replay(subject("Stopping"))
    monkeypatch.setattr("fuzz.replay.parent_process", lambda: "another process")
    with pytest.raises(UsageError, match=r"^it: a breakpoint\(\) needs a terminal; use `specfuzz replay --here`$"):
        replay(subject("Stopping"))
