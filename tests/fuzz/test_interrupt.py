"""Ctrl-C and SIGTERM end a campaign wherever they strike, and what it has found so far is still reported."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from fuzz import cli
from fuzz.interrupt import check, interruptible
from fuzz.journal import read_case
from fuzz.store import Store
from tests.fuzz import fakes
from tests.fuzz.conftest import Eventually

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_exception_and_a_note_until_the_block_ends(number: int) -> None:
    before = signal.getsignal(number)
    check()
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                check()
    check()
    assert signal.getsignal(number) is before


@pytest.mark.exhaustive(every=2, first=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_one_that_python_drops_ends_the_campaign(
    processes: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(phase: str, info: dict[str, int]) -> None:
        signal.raise_signal(signal.SIGINT)

    def press(*_: Any) -> Any:
        """Once, so that a run that did not hear of it goes on."""
        if not pressed:
            pressed.append(True)
            gc.callbacks.append(strike)
            gc.collect()
            gc.callbacks.remove(strike)

    pressed: list[bool] = []
    # In a run of the engine here, and while this process listens to others.
    monkeypatch.setattr(fakes.Sound, "tamper", lambda self, step, done: press() or done)
    monkeypatch.setattr("fuzz.executors._Member.silence", lambda self: press() or 0.0)
    arguments = ["--engine", "tests.fuzz.fakes:Sound", "--worker", "PARDWorker", "--workers", processes]
    assert cli.invoke(["fuzz", "--max-time", "20s", *arguments]) == 2
    assert pressed
    assert "cut short before its budget was spent" in capsys.readouterr().out
    # That is no case that somebody should look at.
    assert os.listdir(Store().running) == []


def running(store: Store) -> bool:
    return any(read_case(path) for path in store.running.glob("*.json"))


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_document_is_printed_and_nothing_left(number: int, eventually: Eventually) -> None:
    command = [sys.executable, "-m", "fuzz", "fuzz", "--json", "--max-time", "60s", "--workers", "2"]
    command += ["--engine", "tests.fuzz.fakes:Slow", "--worker", "PARDWorker"]
    store = Store()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as campaign:
        eventually(lambda: running(store))
        campaign.send_signal(number)
        began = time.monotonic()
        out, err = campaign.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert (campaign.returncode, err) == (2, "")
    assert "cut short before its budget was spent" in json.loads(out)["problems"]
    assert os.listdir(store.running) == []


@pytest.mark.parametrize("pressed", [KeyboardInterrupt, typer.Abort])
def test_ctrl_c_outside_a_campaign(
    pressed: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer hands on one or the other, by its version."""

    def press(store: Store) -> None:
        raise pressed

    monkeypatch.setattr("fuzz.doctor.diagnose", press)
    assert cli.invoke(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err
