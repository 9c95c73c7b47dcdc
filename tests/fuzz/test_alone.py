"""Calls in a process of its own, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from fuzz.alone import Apart, Died, death, elsewhere
from fuzz.audit import ProcessEnded, surviving
from fuzz.journal import Case
from scenarios import UsageError
from tests.fuzz.samples import MIXED


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with closing(Apart()) as apart:
        yield apart
    assert multiprocessing.active_children() == []


def fail(error: Exception) -> None:
    raise error


def test_a_call_returns_what_the_function_does_elsewhere(apart: Apart) -> None:
    assert apart.call(os.getpid) == apart.call(os.getpid) != os.getpid()


def test_errors_come_back_in_one_line(apart: Apart) -> None:
    with pytest.raises(UsageError, match=r"^--that: is wrong$"):
        apart.call(fail, UsageError("--that: is wrong"))
    with pytest.raises(UsageError, match=r"^KeyError: 'row' \(at .*\); this is no finding, please report it$"):
        apart.call(fail, KeyError("row"))
    with pytest.raises(UsageError, match=r"pickle.*this is no finding"):
        apart.call(os.scandir, ".")


@pytest.mark.parametrize("status", [0, 3])
def test_an_end_is_one_whatever_the_status(apart: Apart, status: int) -> None:
    with pytest.raises(Died, match=f"^the process ended with status {status}$") as died:
        apart.call(os._exit, status)
    assert not died.value.killed
    # The next call has another process.
    assert apart.call(len, "abc") == 3


def test_a_kill_is_told_apart_and_a_hang_ends(apart: Apart) -> None:
    with pytest.raises(Died) as died:
        apart.call(signal.raise_signal, signal.SIGKILL)
    assert died.value.killed
    with pytest.raises(Died, match=r"^the process did not end within 0.1 s$") as died:
        apart.call(time.sleep, 600, seconds=0.1)
    assert not died.value.killed


@pytest.mark.exhaustive(every=5, first=1)
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("Sound", None),
        ("Quitting", "the process ended with status 0"),
        ("Dying", "the process was killed by SIGSEGV"),
        ("Killed", None),
        ("Exiting", "SystemExit: enough (at tests/fuzz/fakes.py:"),
    ],
)
def test_the_death_of_a_case(engine: str, message: str | None) -> None:
    cause = death(Case(f"tests.fuzz.fakes:{engine}", "cpu", None, MIXED), 60.0)
    assert cause == message if cause is None or message is None else cause.startswith(message)


@pytest.mark.parametrize("error", [SystemExit(), GeneratorExit("gone"), BaseException("other")])
def test_what_ends_a_process_becomes_an_exception(error: BaseException) -> None:
    with pytest.raises(ProcessEnded) as ended, surviving():
        raise error
    assert str(ended.value).startswith(type(error).__name__)
    assert "test_alone.py:" in str(ended.value.raised_at)


def test_ctrl_c_of_a_person_does_not() -> None:
    with pytest.raises(KeyboardInterrupt), surviving():
        raise KeyboardInterrupt


def test_a_command_says_that_its_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.alone.caller", Apart)
    assert elsewhere(len, "abc") == 3
    with pytest.raises(UsageError, match=r"^--engine: the process ended with status 0; `specfuzz run` looks for"):
        elsewhere(os._exit, 0)
