"""What a campaign amounts to: text, JSON and exit status follow from its events alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.events import BatchFinished, CampaignFinished, Event, HarnessError, Tally
from fuzz.report import Summary, interrupted_line, place
from invariants import find
from scenarios import Violation, scenario_to_json
from tests.fuzz.conftest import Snapshot
from tests.fuzz.samples import FINDING, FOUND, MIXED, events

ASKED = (find("restored-layout"), find("output-lossless"), find("graph-buffers-stable"))


def summary(stream: list[Event], *, named: bool = False) -> Summary:
    total = Summary(ASKED, named=named)
    for event in stream:
        total.feed(event)
    return total


def test_nothing_found(snapshot: Snapshot) -> None:
    total = summary(events())
    snapshot("report_nothing_found", "\n".join(total.lines()))
    assert total.status == 0
    assert total.problems == []


def test_findings_end_with_the_line_that_reproduces_them(snapshot: Snapshot) -> None:
    total = summary(events(FOUND))
    total.interrupted.append(".specfuzz/interrupted/0123abcd.json")
    snapshot("report_findings", "\n".join(total.lines()))
    assert total.status == 1


def test_the_json_document() -> None:
    measured = BatchFinished(worker="MTPEagleWorker", tally=Tally(memory=300))
    total = summary([*events(FOUND), measured])
    total.interrupted.append("x.json")
    assert total.to_json() == {
        "engine": "portable",
        "device": "cpu",
        "seed": 7,
        "cases": 20,
        "steps": 62,
        "seconds": 0.5,
        "faults": {"planned": 8, "fired": 8},
        "invariants": {
            "restored-layout": {"reached": 240, "held": 240},
            "output-lossless": {"reached": 62, "held": 62},
            "graph-buffers-stable": {"reached": 0, "held": 0},
        },
        "unobservable": ["graph-buffers-stable"],
        "workers": {
            "MTPEagleWorker": {"cases": 10, "steps": 31, "memory_mib": 300},
            "PARDWorker": {"cases": 10, "steps": 31, "memory_mib": None},
        },
        "findings": [
            {
                "id": FINDING.id,
                "invariant": "restored-layout",
                "worker": "MTPEagleWorker",
                "bug": None,
                "step": 2,
                "substep": "restored",
                "run": 0,
                "field": "num_contexts",
                "expected": 1,
                "actual": 0,
                "message": "num_contexts is 0 and should be 1: so it was at prepared",
                "raised_at": "speculative/mtp.py:12",
                "seen_on": None,
                "also": ["derived-counters-consistent", "layout-equals-reference"],
                "cases": 6,
                "scenario": scenario_to_json(MIXED),
                "reproduce": f"specfuzz explain {FINDING.id} --engine {FINDING.engine}",
            }
        ],
        "causes": [],
        "interrupted": ["x.json"],
        "problems": [],
    }


GROWN = BatchFinished(worker="PARDWorker", tally=Tally(memory=601, grown=350))
OF_CUDA = BatchFinished(worker="PARDWorker", tally=Tally(memory=620, grown=90))
IDLE = BatchFinished(worker="MTPEagleWorker", tally=Tally(planned=3, fired=2))
ERROR = HarnessError(worker="PARDWorker", key="k", message="steps[1]: the planned fault x@1:oom did not fire")


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (events(ERROR), "PARDWorker: steps[1]: the planned fault x@1:oom did not fire"),
        (events(IDLE), "faults: 10 fired of 11 planned"),
        (
            events(GROWN),
            "memory: a process had 601 MiB resident, 350 more than after its first scenarios; it should be 600 at most",
        ),
        (events()[:-1], "cut short before its budget was spent"),
        (events()[:1], "cut short before its budget was spent"),
        ([events()[0], CampaignFinished(seconds=1.0)], "nothing was executed"),
        (
            [*events()[:2], CampaignFinished(seconds=1.0)],
            "nothing was executed for PARDWorker; raise --max-cases",
        ),
    ],
)
def test_a_run_that_proves_nothing_is_no_success(stream: list[Event], problem: str) -> None:
    total = summary(stream)
    assert total.problems == [problem]
    assert total.status == 2
    assert list(total.lines())[-2:] == [f"problem: {problem}", "no verdict"]


def test_findings_that_probably_have_one_cause_are_named_together(snapshot: Snapshot) -> None:
    elsewhere = replace(MIXED, config=replace(MIXED.config, worker="PARDWorker"))
    twin = replace(FOUND, finding=replace(FINDING, scenario=elsewhere), also=())
    total = summary(events(FOUND, twin))
    snapshot("report_one_cause", "\n".join(total.lines()))
    assert total.to_json()["causes"] == [
        {"invariant": "restored-layout", "findings": (FINDING.id, twin.finding.id)},
    ]


def test_what_torch_itself_takes_is_no_growth() -> None:
    assert summary(events(OF_CUDA)).problems == []


def test_a_run_that_was_cut_short_says_nothing_of_what_it_has_not_reached() -> None:
    total = summary(events()[:1])
    assert total.unobservable == total.unmet == total.unreached == []
    text = "\n".join(total.lines())
    assert "graph-buffers-stable" not in text
    assert "output-lossless" not in text
    assert "output-lossless" in "\n".join(summary(events()[:-1]).lines())


def test_an_invariant_never_reached_is_a_failure_of_the_run(snapshot: Snapshot) -> None:
    shown = BatchFinished(worker="PARDWorker", tally=Tally(observed=("identity",)))
    total = summary(events(shown))
    assert total.unreached == ["graph-buffers-stable"]
    assert total.unobservable == []
    assert total.status == 2
    snapshot("report_never_reached", "\n".join(total.problems))


@pytest.mark.parametrize(("command", "option"), [("run", "--max-cases"), ("fuzz", "--max-time"), ("sweep", "scope")])
def test_what_to_do_about_an_invariant_never_reached_goes_by_the_command(command: str, option: str) -> None:
    total = summary([replace(events()[0], command=command), *events()[1:]], named=True)
    (problem,) = total.problems
    assert option in problem


def test_few_scenarios_must_reach_each_invariant_that_is_no_relation() -> None:
    layout = find("restored-layout")
    total = Summary((layout,))
    batch = BatchFinished(worker="PARDWorker", tally=Tally(cases=1000, observed=layout.reads))
    for event in (events()[0], batch, events()[-1]):
        total.feed(event)
    assert total.unreached == [layout.slug]


def test_an_invariant_that_a_person_named_must_be_reached_whatever_the_engine_shows() -> None:
    assert summary(events(), named=True).unreached == ["graph-buffers-stable"]


def test_a_relation_needs_any_of_what_it_compares() -> None:
    total = Summary((find("replay-equals-eager"),))
    for event in events():
        total.feed(event)
    assert total.unmet == ["replay-equals-eager"]
    assert total.unreached == total.unobservable == []


def test_a_relation_without_a_pair_is_a_problem_where_scenarios_are_many_or_it_was_asked_for() -> None:
    padded = find("padded-equals-unpadded")
    for cases, named, problem in ((1999, False, False), (2000, False, True), (1, True, True)):
        total = Summary((padded,), named=named)
        batch = BatchFinished(worker="PARDWorker", tally=Tally(cases=cases, observed=padded.reads))
        for event in (events()[0], batch, events()[-1]):
            total.feed(event)
        assert (total.unmet, total.unreached) == (([], [padded.slug]) if problem else ([padded.slug], []))


def test_an_invariant_that_no_worker_of_the_run_can_reach_is_none_of_its_problems() -> None:
    one_shot = find("chunked-equals-one-shot")
    for worker, unreached in (("MTPWorker", []), ("PARDWorker", [one_shot.slug])):
        total = Summary((one_shot,))
        batch = BatchFinished(worker=worker, tally=Tally(cases=2000, observed=one_shot.reads))
        for event in (replace(events()[0], workers=(worker,)), batch, events()[-1]):
            total.feed(event)
        assert total.unreached == unreached


def test_findings_stand_whatever_else_went_wrong() -> None:
    assert summary(events(FOUND, ERROR)).status == 1


def test_one_of_something_is_not_many() -> None:
    one = BatchFinished(worker="PARDWorker", tally=Tally(cases=1, steps=1))
    total = summary([*events(workers=())[:1], one, FOUND])
    lines = list(total.lines())
    assert lines[1].startswith("1 scenario, 1 step, ")
    assert lines[-1] == "1 finding"
    total.feed(replace(FOUND, cases=7))
    assert total.verdict == "2 findings"


def test_places() -> None:
    whole = Violation(invariant="steps-complete", step=3)
    assert place(whole) == "steps[3]"
    assert place(replace(whole, substep="draft[1]")) == "steps[3] draft[1]"
    assert place(replace(whole, substep="draft[1]", run=2)) == "steps[3] draft[1] of run 2"


@pytest.mark.parametrize(
    ("engine", "bug", "options"),
    [
        ("portable", None, ""),
        ("portable", "TRT-01/PARDWorker", " --with-bug"),
        ("tests.fuzz.fakes:Sound", None, " --engine tests.fuzz.fakes:Sound"),
    ],
)
def test_an_interrupted_case_is_run_again_as_it_was(tmp_path: Path, engine: str, bug: str | None, options: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"engine": engine, "bug": bug, "scenario": {}}))
    statement = "interrupted: a process ended in this case before its verdict"
    assert interrupted_line(str(path)) == f"{statement}: specfuzz replay {path}{options}"
