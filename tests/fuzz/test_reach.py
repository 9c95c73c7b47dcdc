"""A finding on a GPU says whether the CPU has it too; the GPU is one of the fakes'."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz import reach
from fuzz.events import FindingFound
from fuzz.explain import explain
from fuzz.journal import Case
from fuzz.report import finding_document, finding_lines
from fuzz.unit import Unit
from fuzz.work import run_unit
from scenarios import Finding, finding_from_json, finding_to_json
from tests.fuzz.samples import FINDING, MIXED


@pytest.mark.parametrize(
    ("engine", "device", "seen_on"),
    [("OnlyOnCuda", "cuda", "GPU only"), ("Forgetful", "cuda", "CPU and GPU"), ("Forgetful", "cpu", None)],
)
def test_what_is_found_on_a_gpu_is_run_on_the_cpu(engine: str, device: str, seen_on: str | None) -> None:
    asked = Unit(
        engine=f"tests.fuzz.fakes:{engine}",
        device=device,
        worker="MTPEagleWorker",
        seed=1,
        max_cases=60,
        first=True,
        invariants=("restored-layout",),
    )
    (found,) = (event.finding for event in run_unit(asked) if isinstance(event, FindingFound))
    assert (found.device, found.seen_on) == (device, seen_on)
    assert finding_from_json(finding_to_json(found)) == found


def test_what_cannot_run_on_the_cpu_is_the_gpus() -> None:
    assert reach.of_violation("tests.fuzz.fakes:NoSuchEngine", "cuda", MIXED, "restored-layout") == "GPU only"


def test_so_is_a_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []

    def death(case: Case, seconds: float) -> str | None:
        asked.append(case)
        return "the process ended" if case.bug else None

    monkeypatch.setattr(reach, "death", death)
    assert reach.of_death("e", "cuda", "a-bug", MIXED, 1.0) == "CPU and GPU"
    assert reach.of_death("e", "cuda", None, MIXED, 1.0) == "GPU only"
    assert reach.of_death("e", "cpu", None, MIXED, 1.0) is None
    assert [case.device for case in asked] == ["cpu", "cpu"]


def test_a_person_reads_it() -> None:
    finding: Finding = replace(FINDING, device="cuda", seen_on="GPU only")
    event = FindingFound(finding=finding, cases=1)
    assert "    GPU only" in list(finding_lines(event))
    assert finding_document(event)["seen_on"] == "GPU only"
    assert any("on cuda (GPU only)" in line.text for line in explain(finding, None, "f"))
