"""Findings: a violation with all that is needed to see it again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios import (
    Config,
    Context,
    Finding,
    Request,
    Scenario,
    ScenarioError,
    Step,
    Violation,
    finding_from_json,
    finding_loads,
    finding_to_json,
)

SCENARIO = Scenario(
    config=Config(worker="MTPEagleWorker", max_draft_len=2),
    requests=(Request(id=0, prompt_len=3),),
    steps=(Step(draft_len=2, contexts=(Context(request=0, chunk=3),)),),
)
VIOLATION = Violation(
    invariant="restored-lengths",
    step=0,
    substep="restored",
    field="_seq_lens",
    expected=[3],
    actual=[1],
    message="_seq_lens is not what it was",
)
FINDING = Finding(
    invariant="restored-lengths",
    engine="portable",
    device="cpu",
    scenario=SCENARIO,
    violation=VIOLATION,
    bug="TRT-01/MTPEagleWorker",
    raised_at="engines/portable/speculative/mtp.py:12",
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
    max_leaves=6,
)


@given(expected=json_values, actual=json_values, bug=st.none() | st.text(max_size=5))
def test_a_finding_survives_as_text(expected: Any, actual: Any, bug: str | None) -> None:
    finding = replace(FINDING, bug=bug, violation=replace(VIOLATION, expected=expected, actual=actual))
    assert finding_loads(json.dumps(finding_to_json(finding))) == finding


def test_its_json_says_id_and_version_and_leaves_defaults_out() -> None:
    value = finding_to_json(replace(FINDING, bug=None, raised_at=None))
    assert set(value) == {"version", "id", "invariant", "engine", "device", "scenario", "violation"}
    assert value["version"] == value["scenario"]["version"] == 1
    assert "run" not in value["violation"]


def test_the_id_is_short_and_pinned() -> None:
    """Reports, file names and links hold it: it must not change between releases."""
    assert FINDING.id == "3dd47ae2"


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "tensorrt_llm"},
        {"bug": None},
        {"invariant": "host-equals-device"},
        {"scenario": replace(SCENARIO, config=replace(SCENARIO.config, seed=1))},
    ],
)
def test_another_case_has_another_id(change: dict[str, Any]) -> None:
    assert replace(FINDING, **change).id != FINDING.id


@pytest.mark.parametrize(
    "change", [{"device": "cuda"}, {"raised_at": None}, {"violation": replace(VIOLATION, actual=[2])}]
)
def test_what_was_seen_does_not_change_the_id(change: dict[str, Any]) -> None:
    assert replace(FINDING, **change).id == FINDING.id


def test_the_id_is_recomputed_when_reading() -> None:
    value = finding_to_json(FINDING)
    value["id"] = "../../etc"
    assert finding_from_json(value).id == FINDING.id


def changed(path: str, value: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(finding_to_json(FINDING)))
    *outer, last = path.split(".")
    place: Any = result
    for key in outer:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 0, "version: is 0; this release reads version 1"),
        ("scenario.version", 3, "scenario.version: is 3; this release reads version 1"),
        ("scenario", [], "scenario: is a list; write an object"),
        ("scenario.steps", [], "scenario.steps: is empty; add a step"),
        ("scenario.steps.0.draft_len", 9, "scenario.steps[0].draft_len: 9 is outside 0..2"),
        ("scenario.config.seed", "1", "scenario.config.seed: is a text; write a whole number"),
        ("violation.step", None, "violation.step: is null; write a whole number"),
        ("violation.filed", "x", "violation.filed: is not a field; did you mean 'field'?"),
        ("engin", "x", "engin: is not a field; did you mean 'engine'?"),
        ("bug", 3, "bug: is the number 3; write a text"),
    ],
)
def test_a_refusal_names_the_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        finding_from_json(changed(path, value))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_a_text_that_holds_no_finding(text: str) -> None:
    with pytest.raises(ScenarioError, match=r"^finding: "):
        finding_loads(text)
