"""Killed at any moment, a campaign leaves a state that a later run can read, and no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import cli
from fuzz.journal import Case, read_case
from fuzz.store import Store
from fuzz.subject import read_subject
from tests.fuzz.conftest import Eventually
from tests.fuzz.fakes import mixed

ROOT = Path(__file__).parents[2]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.exhaustive(every=2, first=1)
@pytest.mark.parametrize("processes", [1, 2])
def test_kill_9_of_everything(processes: int, capsys: pytest.CaptureFixture[str], eventually: Eventually) -> None:
    store = Store()
    worker = ["--worker", "PARDWorker", "--workers"]
    command = [sys.executable, "-m", "fuzz", "fuzz", "--max-time", "600s", "--engine", "tests.fuzz.fakes:Hanging"]
    command += [*worker, str(processes)]
    campaign = subprocess.Popen(command, cwd=ROOT)

    def running() -> list[Case]:
        return [case for path in sorted(store.running.glob("*.json")) if (case := read_case(path))]

    # Cases in which the engine hangs, so that none ends while this looks at them.
    eventually(lambda: [any(map(mixed, case.scenario.steps)) for case in running()] == [True] * processes)
    children = children_of(campaign.pid)
    campaign.send_signal(signal.SIGKILL)
    campaign.wait()
    eventually(lambda: not any(map(alive, children)))

    left = [case.scenario for case in running()]
    assert len(left) == processes
    assert store.totals().unfinished == 1
    # The next campaign says what was running, once.
    again = [
        "run",
        "--engine",
        "tests.fuzz.fakes:Sound",
        *worker,
        "1",
        "--max-cases",
        "1",
        "--invariant",
        "acceptance-in-range",
        "--json",
    ]
    cli.invoke(again)
    interrupted = json.loads(capsys.readouterr().out)["interrupted"]
    assert [read_subject(Path(path)).scenario for path in interrupted] == left
    assert cli.invoke(["replay", interrupted[0], "--engine", "tests.fuzz.fakes:Sound"]) == 0
    capsys.readouterr()
    cli.invoke(again)
    assert json.loads(capsys.readouterr().out)["interrupted"] == []
    assert store.totals().campaigns == 3
    assert os.listdir(store.running) == []
