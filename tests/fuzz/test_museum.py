"""Seeded defects are hunted one by one, and one that escapes is not a success."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fuzz import cli
from fuzz.events import BatchFinished, CampaignFinished, Event, FindingFound, HarnessError, Tally
from fuzz.museum_report import MuseumSummary
from museum import Bug
from tests.fuzz import fakes
from tests.fuzz.conftest import Snapshot
from tests.fuzz.samples import FINDING


def bug(id: str) -> Bug:
    return Bug(id, "K2", "MTPEagleWorker", "a title", "PR #1", ("restored-layout",), lambda patch: None)


FOUND, ESCAPED = bug("TRT-03/MTPEagleWorker"), bug("TRT-04/MTPEagleWorker")
EVENTS: list[Event] = [
    BatchFinished(worker="MTPEagleWorker", bug=FOUND.id, tally=Tally(cases=12, seconds=0.25)),
    FindingFound(finding=replace(FINDING, bug=FOUND.id), cases=12),
    BatchFinished(worker="MTPEagleWorker", bug=ESCAPED.id, tally=Tally(cases=100, seconds=1.0)),
    BatchFinished(worker="MTPEagleWorker", bug=ESCAPED.id, tally=Tally(cases=50, seconds=0.5)),
    CampaignFinished(seconds=2.0),
]


def summary(events: list[Event]) -> MuseumSummary:
    total = MuseumSummary([FOUND, ESCAPED])
    for event in events:
        total.feed(event)
    return total


def test_what_a_hunt_amounts_to(snapshot: Snapshot) -> None:
    total = summary(EVENTS)
    snapshot("museum", "\n".join(total.lines()))
    assert total.status == 1
    assert total.to_json() == {
        "found": 1,
        "total": 2,
        "median": {"cases": None, "seconds": None},
        "bugs": [
            {
                "id": FOUND.id,
                "kind": "K2",
                "worker": "MTPEagleWorker",
                "found": True,
                "invariant": "restored-layout",
                "cases": 12,
                "seconds": 0.25,
                "requests": 2,
                "steps": 3,
                "finding": replace(FINDING, bug=FOUND.id).id,
            },
            {
                "id": ESCAPED.id,
                "kind": "K2",
                "worker": "MTPEagleWorker",
                "found": False,
                "invariant": None,
                "cases": 150,
                "seconds": 1.5,
                "requests": None,
                "steps": None,
                "finding": None,
            },
        ],
        "interrupted": [],
        "problems": [],
    }


def test_beside_a_hunt_without_aim(snapshot: Snapshot) -> None:
    total = summary([*EVENTS, FindingFound(finding=replace(FINDING, bug=ESCAPED.id), cases=150)])
    total.baseline = summary(EVENTS)
    snapshot("museum_baseline", "\n".join(total.lines()))
    assert total.status == 0
    document = total.to_json()
    assert document["median"] == {"cases": 81, "seconds": 0.875}
    assert document["baseline"]["median"] == {"cases": None, "seconds": None}
    total.baseline.finished = False
    assert total.problems == ["drawn without aim: cut short before its budget was spent"]


def test_all_found_is_a_success() -> None:
    total = MuseumSummary([FOUND])
    for event in EVENTS:
        total.feed(event)
    assert total.status == 0


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([HarnessError(worker="W", key="k", message="m", bug=FOUND.id), *EVENTS], f"{FOUND.id}: m"),
        ([HarnessError(worker="W", key="k", message="m"), *EVENTS], "W: m"),
        (EVENTS[:-1], "cut short before its budget was spent"),
    ],
)
def test_a_hunt_that_proves_nothing(events: list[Event], problem: str) -> None:
    total = summary(events)
    assert total.problems == [problem]
    assert total.status == 2
    assert f"problem: {problem}" in list(total.lines())


def test_nothing_found_shows_no_example() -> None:
    assert list(summary(EVENTS[-1:]).lines())[-2:] == ["", "0 of 2 seeded defects found"]


@pytest.fixture
def _museum(monkeypatch: pytest.MonkeyPatch, empty_museum: dict[str, Bug]) -> None:
    """A museum of two: one defect of the fake engine, and one that changes nothing."""

    def forget(patch: Any) -> None:
        patch(fakes.Sound, "tamper", fakes.Forgetful.tamper)

    empty_museum.update({FOUND.id: replace(FOUND, apply=forget), ESCAPED.id: ESCAPED})
    monkeypatch.setattr("fuzz.engines.ENGINES", {"portable": "tests.fuzz.fakes:Sound"})


@pytest.mark.usefixtures("_museum")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["museum", "--bug", "trt-03", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["bugs"]
    assert row["found"]
    assert (row["requests"], row["steps"]) == (2, 2)
    # It can be looked at, under its defect, and is no finding in the engine as it is.
    assert cli.invoke(["explain", row["finding"]]) == 1
    assert f"seeded defect {FOUND.id}" in capsys.readouterr().out
    assert cli.invoke(["replay"]) == 2
    assert "no findings are stored" in capsys.readouterr().out


@pytest.mark.usefixtures("_museum")
def test_a_defect_that_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["museum", "--bug", ESCAPED.id, "--max-cases", "5", "--faults", "none", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bugs"][0]["cases"] == 5
