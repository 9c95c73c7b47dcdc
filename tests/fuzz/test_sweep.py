"""A sweep goes on where it stopped, and covers everything in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fuzz import cli

ARGUMENTS = ("--worker", "SAWorker", "--max-batch", "1", "--max-draft-len", "1", "--workers", "1", "--json")


def sweep(capsys: pytest.CaptureFixture[str], engine: str, *more: str) -> Any:
    cli.invoke(["sweep", "--engine", f"tests.fuzz.fakes:{engine}", *ARGUMENTS, *more])
    return json.loads(capsys.readouterr().out)


def test_parts_cover_what_the_whole_does(capsys: pytest.CaptureFixture[str]) -> None:
    whole = sweep(capsys, "Sound")
    assert (whole["problems"], whole["findings"]) == ([], [])
    assert sum(site["points"] for site in whole["sites"].values()) == whole["cases"]
    first = sweep(capsys, "Sound", "--max-points", "20")
    assert (first["cases"], first["earlier"]) == (20, 0)
    rest = sweep(capsys, "Sound")
    assert (rest["earlier"], rest["sites"]) == (20, whole["sites"])


def test_a_fault_that_does_not_fire_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert any("did not fire" in problem for problem in sweep(capsys, "Silent")["problems"])
