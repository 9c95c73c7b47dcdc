"""The whole command line: what a person sees, exit statuses, one JSON document, one line per error."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz import cli, gate
from fuzz.journal import Case, Journal
from fuzz.store import Store
from scenarios import WORKERS, finding_to_json, scenario_to_json
from tests.fuzz.conftest import Snapshot
from tests.fuzz.samples import FINDING, MIXED

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
COMMANDS = (
    "run",
    "fuzz",
    "sweep",
    "replay",
    "explain",
    "export",
    "museum",
    "leaks",
    "acceptance",
    "list",
    "doctor",
    "gate",
)


def fake(engine: str) -> tuple[str, str]:
    return "--engine", f"tests.fuzz.fakes:{engine}"


def document(capsys: Capture) -> Any:
    """The one JSON document on standard output; nothing is on standard error."""
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def timeless(text: str) -> str:
    return re.sub(r"\d+\.\d+( s)?$", "SECONDS", text, flags=re.MULTILINE)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, capsys: Capture, snapshot: Snapshot) -> None:
    assert cli.invoke([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    snapshot(f"help_{command or 'all'}", out)


MISTAKES = [
    "",
    "rnu",
    "run --wrker PARDWorker",
    "run -x",
    "run extra",
    "run --seed",
    "run --seed x",
    "run --seed -1",
    "run --worker PARDWorkr",
    "run --invariant output-losless",
    "run --faults seam",
    "run --engine portible",
    "run --engine tests.fuzz.fakes:Nobody --workers 1",
    "run --engine nowhere:Nobody --workers 1",
    "run --engine tests.fuzz.fakes:Refusing --workers 1",
    "run --engine json:loads --workers 1",
    "run --engine builtins:dict --workers 1",
    "run --engine : --workers 1",
    "run --report-dir bad.json",
    "export scenario.json --output .",
    "run --device gpu",
    "run --max-draft-len 99",
    "run --max-cases 0",
    "run --max-cases 1000000001",
    "run --engine= --workers 1",
    "run --device= --workers 1",
    "run --trtllm-source some/where",
    "run --workers 0",
    "fuzz --max-time soon",
    "replay nosuch",
    "explain ''",
    "replay nosuch.json",
    "replay .",
    "replay bad.json",
    "replay site.json",
    "replay finding.json",
    "replay device.json",
    "replay scenario.json --with-bug",
    "replay scenario.json --with-bug NO-99",
    "replay scenario.json --with-bug TRT-01/PARDWorker",
    "acceptance --worker PARDWorker --attention-backend TRTLLM --with-bug TRT-12/MTPEagleWorker",
    "replay scenario.json --engine=",
    "replay scenario.json --device=",
    "replay scenario.json --trtllm-source some/where",
    "replay twice.json",
    "explain scenario.json --trtllm-source some/where",
    "export scenario.json --trtllm-source some/where",
    "acceptance --trtllm-source some/where",
    "gate --base=",
    "explain",
    "list",
    "list worker",
    "list metadata --worker PARDWorker",
    "list bugs --device cuda",
    "list sites --trtllm-source some/where",
    "list sites --faults none",
    "museum --bug NO-99",
    "museum --max-cases 0",
]


def test_every_mistake_gets_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    pytest.importorskip("torch", reason="two of the mistakes show when the portable engine runs")
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"version": 1, "confg": {}}')
    Path("scenario.json").write_text(json.dumps(scenario_to_json(MIXED)))
    Path("twice.json").write_text('{"version": 1, "config": {"seed": 1, "seed": 2}}')
    monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", "as it is")
    Path("site.json").write_text(
        json.dumps(scenario_to_json(MIXED)).replace("draft_model.forward", "draft_modl.forward")
    )
    finding = replace(FINDING, engine="portable", bug="NO-99")
    Path("finding.json").write_text(json.dumps(finding_to_json(finding)))
    Path("device.json").write_text(json.dumps(finding_to_json(replace(finding, device="tpu"))))
    lines = []
    for mistake in MISTAKES:
        assert cli.invoke(shlex.split(mistake)) == 2, mistake
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        lines.append(f"$ specfuzz {mistake}\n{err}")
    # Which defects there are changes with every new one.
    snapshot("mistakes", re.sub(r"(called 'NO-99'; ).*", r"\1...", "".join(lines)))


@pytest.mark.exhaustive
def test_a_run_of_a_sound_engine(capsys: Capture) -> None:
    count = 2 * len(WORKERS)
    arguments = ["run", *fake("Sound"), "--invariant", "output-lossless", "--max-cases", str(count)]
    assert cli.invoke([*arguments, "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].startswith("tests.fuzz.fakes:Sound on cpu, seed 0, ")
    assert out.splitlines()[1].startswith(f"{count} scenarios, ")
    assert out.endswith("\nnothing found\n")
    assert all(re.search(rf"^{worker} +2 ", out, re.MULTILINE) for worker in WORKERS)
    # Two processes do the same.
    assert cli.invoke([*arguments, "--workers", "2", "--json"]) == 0
    found = document(capsys)
    assert found["cases"] == count
    assert f"faults fired {found['faults']['fired']}/{found['faults']['planned']}" in out
    assert set(found["workers"]) == set(WORKERS)
    assert found["invariants"]["output-lossless"]["reached"] > 0
    assert (found["findings"], found["problems"], found["interrupted"]) == ([], [], [])


def test_a_run_that_finds_something_and_what_can_be_done_with_it(tmp_path: Path, capsys: Capture) -> None:
    report = tmp_path / "report"
    arguments = ["run", *fake("Forgetful"), "--worker", "mtpeagleworker", "--max-cases", "60", "--json"]
    assert cli.invoke([*arguments, "--report-dir", str(report)]) == 1
    found = document(capsys)
    (finding,) = found["findings"]
    assert finding["substep"] == "restored"
    assert finding["field"] == "num_contexts"
    again = f"specfuzz explain {finding['id']} {' '.join(fake('Forgetful'))}"
    assert finding["reproduce"] == again
    assert json.loads((report / "report.json").read_text()) == found
    assert f"    {again}\n" in (report / "report.txt").read_text()
    kept = report / "findings" / f"{finding['id']}.json"
    assert json.loads(kept.read_text())["id"] == finding["id"]

    # The file does not choose whose code runs.
    assert cli.invoke(["explain", finding["id"]]) == 2
    assert "is not one of this suite's; write --engine tests.fuzz.fakes:Forgetful" in capsys.readouterr().err
    assert cli.invoke(["explain", finding["id"], *fake("Forgetful")]) == 1
    page = capsys.readouterr().out
    assert re.search(r"^> restored +num_contexts +1 +0$", page, re.MULTILINE)
    assert page.endswith(f"\n{finding['id']}: fails\n")

    assert cli.invoke(["replay", "--json", *fake("Forgetful")]) == 1
    assert document(capsys)["failed"] == 1
    # Repaired, it holds.
    assert cli.invoke(["explain", finding["id"], *fake("Sound")]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"found on engine tests.fuzz.fakes:Forgetful on cpu: {finding['invariant']}\n    steps[")
    assert finding["message"] in page.splitlines()[1]
    assert f"{finding['id']}: holds, " in page


def test_a_fault_that_does_not_fire_is_no_success(capsys: Capture) -> None:
    assert cli.invoke(["run", *fake("Silent"), "--worker", "PARDWorker", "--max-cases", "30"]) == 2
    out = capsys.readouterr().out
    assert "did not fire" in out
    assert out.endswith("\nno verdict\n")


def test_an_invariant_that_is_never_reached_is_no_success(capsys: Capture) -> None:
    arguments = ["run", *fake("Sound"), "--worker", "PARDWorker", "--invariant", "restored-identity"]
    assert cli.invoke([*arguments, "--max-cases", "5"]) == 2
    assert "problem: never reached: restored-identity; raise --max-cases" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_campaign_ends_with_its_time(capsys: Capture) -> None:
    # Three for two processes.
    named = [option for worker in list(WORKERS)[:3] for option in ("--worker", worker)]
    arguments = ["fuzz", "--max-time", "0.5s", *fake("Sound"), *named, "--invariant", "output-lossless"]
    assert cli.invoke([*arguments, "--workers", "2", "--json"]) == 0
    found = document(capsys)
    assert 0.5 < found["seconds"] < 300
    assert all(worker["cases"] > 0 for worker in found["workers"].values())
    assert found["seed"] > 0


def test_ctrl_c_reports_what_there_is(capsys: Capture) -> None:
    arguments = ["run", *fake("Interrupted"), "--worker", "MTPEagleWorker", "--workers", "1"]
    assert cli.invoke(arguments) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert "problem: cut short before its budget was spent\n" in out
    assert Store().totals().unfinished == 1


def test_replay_and_explain(
    tmp_path: Path, capsys: Capture, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("story.json").write_text(json.dumps({"title": "A story", "scenario": scenario_to_json(MIXED)}))
    Path("finding.json").write_text(json.dumps(finding_to_json(FINDING)))
    assert cli.invoke(["replay", "story.json", *fake("Sound")]) == 0
    holds = capsys.readouterr().out
    snapshot("replay_holds", re.sub(r"\d+ invariants", "N invariants", holds))
    assert cli.invoke(["replay", "story.json", *fake("Forgetful")]) == 1
    snapshot("replay_fails", capsys.readouterr().out)
    assert cli.invoke(["replay", "story.json", *fake("Silent")]) == 2
    snapshot("replay_unsound", capsys.readouterr().out)
    assert cli.invoke(["explain", "finding.json", *fake("Forgetful")]) == 1
    assert capsys.readouterr().out.endswith("\nfinding.json: fails\n")
    assert cli.invoke(["explain", "finding.json", *fake("Forgetful"), "--provenance"]) == 2
    assert "--provenance: rows are followed in the portable engine only" in capsys.readouterr().err
    assert cli.invoke(["replay", "story.json", "finding.json", *fake("Sound"), "--json"]) == 0
    results = document(capsys)
    assert [(r["name"], r["holds"]) for r in results["results"]] == [("story.json", True), ("finding.json", True)]
    assert (results["total"], results["failed"]) == (2, 0)


def test_texts_of_a_file_do_not_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "story.json"
    value = {"title": "A \x1b[2Jstory", "story": "one\ntwo\x07", "scenario": scenario_to_json(MIXED)}
    path.write_text(json.dumps(value))
    assert cli.invoke(["replay", str(path), *fake("Sound")]) == 0
    assert capsys.readouterr().out.startswith("A \\x1b[2Jstory\none\ntwo\\x07\n")


def test_what_is_no_journal_is_named_and_passed_over(capsys: Capture) -> None:
    store = Store()
    store.prepare()
    foreign = [store.running / name for name in ("mine.json", "notes.txt", "pipe.json")]
    foreign[0].write_text('{"version": 1}')
    foreign[1].touch()
    os.mkfifo(foreign[2])
    assert cli.invoke(["run", *fake("Sound"), "--worker", "PARDWorker", "--max-cases", "1", "--workers", "1"]) != 1
    out, err = capsys.readouterr()
    assert "PARDWorker" in out
    assert err == "".join(
        f"specfuzz: {path}: is no journal of a search, and is passed over; remove it\n" for path in foreign
    )
    assert all(path.exists() for path in foreign)


def test_replaying_nothing_is_no_success(capsys: Capture) -> None:
    assert cli.invoke(["replay"]) == 2
    assert capsys.readouterr().out == "no findings are stored; name a scenario file, or run `specfuzz run` first\n"
    # A finding under a seeded defect is none in the engine as it is.
    path = Store().save(replace(FINDING, bug="TRT-01/MTPEagleWorker"))
    assert cli.invoke(["replay"]) == 2
    out = capsys.readouterr().out
    assert f"{path.parent} has 1 under seeded defects" in out
    assert out.endswith(f"specfuzz replay {path.stem}\n")


def test_a_finding_that_was_damaged_is_named(tmp_path: Path, capsys: Capture) -> None:
    home = Path(os.environ["SPECFUZZ_HOME"])
    (home / "findings").mkdir(parents=True)
    (home / "findings" / "0123abcd.json").write_text(json.dumps(finding_to_json(FINDING))[:200])
    assert cli.invoke(["replay"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "0123abcd.json: is not JSON" in err
    # The others are replayed, and what was interrupted is mentioned.
    Store().save(FINDING)
    with Journal(Store().running / "1.json").case(Case("portable", "cpu", None, MIXED)):
        (text,) = (path.read_text() for path in Store().running.iterdir())
    (Store().running / "2.json").write_text(text)
    [path] = Store().take_interrupted()
    assert cli.invoke(["replay", *fake("Sound")]) == 2
    out, err = capsys.readouterr()
    assert f"{FINDING.id}: holds, " in out
    line = "not run here, interrupted: a process ended in this case before its verdict"
    assert out.endswith(f"{line}: specfuzz replay {path}\n")
    assert err.count("\n") == 1
    assert cli.invoke(["replay", "--json", *fake("Sound")]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["total"], len(found["problems"])) == (1, 1)


def test_a_home_that_cannot_be_written_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFUZZ_HOME", "/proc/specfuzz")
    assert cli.invoke(["run", *fake("Sound")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specfuzz: SPECFUZZ_HOME: /proc/specfuzz cannot be written (")
    assert err.count("\n") == 1


def test_a_report_folder_that_cannot_be_written_is_named(capsys: Capture) -> None:
    arguments = ["run", *fake("Sound"), "--worker", "PARDWorker", "--max-cases", "2", "--report-dir", "/proc/report"]
    assert cli.invoke(arguments) == 2
    assert capsys.readouterr().err.startswith("specfuzz: --report-dir: /proc/report cannot be written (")


@pytest.mark.parametrize("what", ["workers", "invariants", "bugs"])
def test_lists(what: str, capsys: Capture) -> None:
    assert cli.invoke(["list", what, "--json"]) == 0
    rows = document(capsys)
    assert all(row["name"] and row["summary"] for row in rows)
    assert cli.invoke(["list", what]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [row["name"] for row in rows]


def test_the_list_of_sites(capsys: Capture, snapshot: Snapshot) -> None:
    assert cli.invoke(["list", "sites", *fake("Sound"), "--worker", "PARDWorker"]) == 0
    snapshot("list_sites", capsys.readouterr().out)
    assert cli.invoke(["list", "sites", *fake("Sound"), "--json"]) == 0
    rows = document(capsys)
    assert {row["worker"] for row in rows} == set(WORKERS)
    assert rows[0]["occurrences"] == {"capture": 2, "warmup": 2, "eager": 2, "replay": 2}


def test_the_version(capsys: Capture) -> None:
    assert cli.invoke(["--version"]) == 0
    assert re.fullmatch(r"specfuzz (\d+\.\d+\.\d+|of a checkout that is not installed)\n", capsys.readouterr().out)


@pytest.mark.exhaustive
def test_an_output_that_takes_nothing_gets_one_line() -> None:
    command = [sys.executable, "-m", "fuzz", "list", "workers"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "specfuzz: standard output: cannot be written (No space left on device); write to another place\n"
    )


def test_the_program_as_it_is_started() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "list", "workers", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert [row["name"] for row in json.loads(done.stdout)] == list(WORKERS)


@pytest.mark.exhaustive
def test_a_reader_that_goes_away_is_no_crash() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m fuzz list invariants | true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_an_end_of_the_process_in_a_command_is_no_silence(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("fuzz.doctor.diagnose", lambda store: sys.exit(0))
    assert cli.invoke(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("specfuzz: SystemExit: 0 (at ")


@pytest.mark.spawned
def test_a_scenario_that_ends_the_process_is_found_and_shown(capsys: Capture) -> None:
    engine = fake("Quitting")
    arguments = ["run", *engine, "--worker", "PARDWorker", "--max-cases", "40", "--workers", "1", "--json"]
    assert cli.invoke(arguments) == 1
    (finding,) = document(capsys)["findings"]
    assert finding["invariant"] == "process-survives"
    assert cli.invoke(["explain", finding["id"], *engine]) == 1
    page = capsys.readouterr().out
    assert "    the process ended with status 0\n" in page
    assert page.endswith(f"\n{finding['id']}: fails\n")
    # One after the other, each in a process that lives.
    assert cli.invoke(["replay", finding["id"], finding["id"], *engine, "--json"]) == 1
    assert document(capsys)["failed"] == 2
    assert cli.invoke(["replay", finding["id"], *fake("Killed")]) == 2
    problem = "the process that ran it was killed from outside: is memory short? Run it again"
    assert capsys.readouterr().err == f"specfuzz: {finding['id']}: {problem}\n"


def test_the_doctor(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"name": "portable", "ok": True, "summary": "the engine that the suite brings"}
    monkeypatch.setattr("fuzz.doctor.diagnose", lambda store: [row, {**row, "name": "cuda", "ok": False}])
    assert cli.invoke(["doctor"]) == 0
    assert capsys.readouterr().out == (
        "portable  yes  the engine that the suite brings\ncuda      no   the engine that the suite brings\n"
    )
    monkeypatch.setattr("fuzz.doctor.diagnose", lambda store: [{**row, "ok": False}])
    assert cli.invoke(["doctor", "--json"]) == 2
    assert document(capsys) == [{**row, "ok": False}]


def test_a_checkout_of_upstream_is_known_to_every_process(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", "before")
    arguments = ["list", "sites", *fake("Sound"), "--worker", "PARDWorker"]
    assert cli.invoke(arguments) == 0
    assert os.environ["SPECFUZZ_TRTLLM_SOURCE"] == "before"
    assert cli.invoke([*arguments, "--trtllm-source", "some/where"]) == 0
    assert os.environ["SPECFUZZ_TRTLLM_SOURCE"] == "some/where"


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_the_gate(passed: bool, status: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(base: str | None) -> gate.GateResult:
        return gate.GateResult(str(base), 95.0, 10, {} if passed else {"fuzz/x.py": (1, 2, 3)})

    monkeypatch.setattr(gate, "gate", judge)
    assert cli.invoke(["gate", "--base", "v1"]) == status
    assert capsys.readouterr().out.startswith(f"gate: {'passed' if passed else 'failed'}: tests run ")


def test_what_nobody_expected_is_no_finding(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("fuzz.doctor.diagnose", lambda store: 1 / 0)
    assert cli.invoke(["doctor"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("specfuzz: ZeroDivisionError: division by zero (at ")
    assert line.endswith("; this is no finding, please report it\n")


def test_main_ends_the_process(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["specfuzz", "list", "workers"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        cli.main(["nothing"])
    assert ended.value.code == 2
