"""A sweep goes on where it stopped, and covers everything in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fuzz import cli
from fuzz.events import Event, FindingFound
from fuzz.scope import Scope, Slice
from fuzz.store import Store
from fuzz.unit import Unit
from fuzz.work import run_unit

ARGUMENTS = ("--worker", "SAWorker", "--max-batch", "1", "--max-draft-len", "1", "--workers", "1", "--json")


def sweep(capsys: pytest.CaptureFixture[str], engine: str, *more: str) -> Any:
    cli.invoke(["sweep", "--engine", f"tests.fuzz.fakes:{engine}", *ARGUMENTS, *more])
    return json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
def test_parts_cover_what_the_whole_does(capsys: pytest.CaptureFixture[str]) -> None:
    whole = sweep(capsys, "Sound")
    assert (whole["problems"], whole["findings"]) == ([], [])
    assert sum(site["points"] for site in whole["sites"].values()) == whole["cases"]
    parts = [sweep(capsys, "Sound", "--max-points", "60")]
    while parts[-1]["slices"]["complete"] < whole["slices"]["all"]:
        parts.append(sweep(capsys, "Sound", "--max-points", "60"))
    assert [part["earlier"] for part in parts] == list(range(0, whole["cases"], 60))
    assert (parts[-1]["cases"], parts[-1]["sites"]) == (whole["cases"], whole["sites"])
    # A sweep that is complete begins anew.
    assert sweep(capsys, "Sound", "--max-points", "1")["earlier"] == 0


class Killed(BaseException):
    """The process ends here."""


def test_a_killed_sweep_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """What has been stored by then counts, once: points, and a finding whose batch was not heard of."""
    whole = sweep(capsys, "Stingy")
    note, found = Store.note, []

    def killed(self: Store, key: str, event: Event) -> None:
        if found:
            raise Killed
        note(self, key, event)
        found.extend([event] if isinstance(event, FindingFound) else [])

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Store, "note", killed)
        sweep(capsys, "Stingy")
    rest = sweep(capsys, "Stingy")
    assert rest["earlier"] > 0
    assert (rest["cases"], rest["sites"]) == (whole["cases"], whole["sites"])
    assert [f["id"] for f in rest["findings"]] == [f["id"] for f in whole["findings"]] != []


@pytest.mark.exhaustive
def test_a_leaked_save_is_found() -> None:
    pytest.importorskip("torch", reason="the portable engine needs torch")
    part = Slice(scope=Scope(max_batch=1, max_draft_len=2, steps=2), number=7, of=12)
    worker = "MTPEagleWorker"
    unit = Unit(
        engine="portable", device="cpu", worker=worker, seed=0, max_cases=14, bug=f"TRT-01/{worker}", slice=part
    )
    (finding,) = (event.finding for event in run_unit(unit) if isinstance(event, FindingFound))
    assert finding.invariant == "saved-state-empty"
    assert [step.fault is not None for step in finding.scenario.steps] == [True]


def test_a_fault_that_does_not_fire_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert any("did not fire" in problem for problem in sweep(capsys, "Silent")["problems"])
