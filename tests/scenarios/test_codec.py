"""JSON of scenarios: strict when reading, short when writing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios import (
    WORKERS,
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Schedule,
    Step,
    StepTrace,
    UsageError,
    dumps,
    loads,
    scenario_from_json,
    scenario_to_json,
)
from scenarios.codec import from_json, parse, to_json

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.json"))

numbers = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=8)
contexts = st.builds(Context, request=st.none() | numbers, chunk=numbers, agree=numbers)
generations = st.builds(Generation, request=st.none() | numbers, agree=numbers, past=numbers, accept=numbers)
faults = st.builds(Fault, site=texts, occurrence=numbers, kind=st.sampled_from(FaultKind))
steps = st.builds(
    Step,
    phase=st.sampled_from(Phase),
    draft_len=numbers,
    contexts=st.lists(contexts, max_size=1).map(tuple),
    generations=st.lists(generations, max_size=1).map(tuple),
    finish=st.lists(numbers, max_size=2).map(tuple),
    fault=st.none() | faults,
)
configs = st.builds(Config, worker=texts, max_draft_len=numbers, seed=numbers, attention_backend=texts)
any_scenarios = st.builds(
    Scenario,
    config=configs,
    requests=st.lists(st.builds(Request, id=numbers, prompt_len=numbers), max_size=2).map(tuple),
    steps=st.lists(steps, max_size=2).map(tuple),
    note=texts,
)
"""Well-typed and mostly impossible."""


@st.composite
def possible_scenarios(draw: st.DrawFn) -> Scenario:
    """A prompt or two and what could come next, one row at a time."""
    worker = draw(st.sampled_from(sorted(WORKERS)))
    longest = draw(st.integers(1, 3))
    tree = {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": longest} if WORKERS[worker].tree else {}
    config = Config(worker=worker, max_draft_len=longest, seed=draw(st.integers(0, 9)), **tree)
    lengths = st.integers(max(1, config.least_history), 9)
    requests = tuple(Request(id=i, prompt_len=draw(lengths)) for i in range(draw(st.integers(1, 2))))
    schedule, done = Schedule(config, requests), []
    for _ in range(draw(st.integers(1, 4))):
        k = draw(st.integers(config.min_draft_len, config.max_draft_len))
        agree = draw(st.integers(0, k))
        active = schedule.waiting + schedule.generating
        if not active or schedule.over:
            break
        request = draw(st.sampled_from(active))
        fault = draw(
            st.none()
            | st.builds(Fault, site=st.just("torch.clone"), occurrence=st.just(1), kind=st.sampled_from(FaultKind))
        )
        state = schedule.requests[request]
        if state.in_context:
            left = state.prompt_len - state.past
            chunk = draw(st.integers(1, left)) if config.traits.chunked_prefill else left
            row = Context(request=request, chunk=chunk, agree=agree if config.traits.drafts_for_contexts else 0)
            step = Step(draft_len=k, contexts=(row,), fault=fault)
        else:
            step = Step(draft_len=k, generations=(Generation(request=request, agree=agree),), fault=fault)
        schedule.advance(step)
        done.append(step)
    return Scenario(config=config, requests=requests, steps=tuple(done))


class TestRoundTrip:
    @given(any_scenarios)
    def test_every_value_survives(self, scenario: Scenario) -> None:
        assert from_json(Scenario, json.loads(json.dumps(to_json(scenario)))) == scenario

    @given(possible_scenarios())
    def test_every_possible_scenario_survives_as_text(self, scenario: Scenario) -> None:
        text = dumps(scenario)
        assert loads(text) == scenario
        assert dumps(loads(text)) == text
        assert loads(dumps(scenario, indent=2)) == scenario

    @pytest.mark.parametrize("path", EXAMPLES, ids=[p.stem for p in EXAMPLES])
    def test_the_examples(self, path: Path) -> None:
        value = json.loads(path.read_text())["scenario"]
        assert scenario_to_json(scenario_from_json(value)) == value

    def test_there_are_examples(self) -> None:
        assert EXAMPLES


def outcome(text: str) -> Scenario | ScenarioError:
    try:
        return loads(text)
    except ScenarioError as error:
        return error


def base() -> dict[str, Any]:
    """A scenario in which every kind of value occurs."""
    return {
        "version": 1,
        "config": {"worker": "MTPEagleWorker", "max_draft_len": 2},
        "requests": [{"id": 0, "prompt_len": 3}],
        "steps": [
            {"phase": "capture", "draft_len": 2, "generations": [{"request": None, "past": 2}]},
            {"draft_len": 2, "contexts": [{"request": 0, "chunk": 3, "agree": 1}]},
            {
                "draft_len": 2,
                "generations": [{"request": 0}],
                "fault": {"site": "torch.clone", "occurrence": 1, "kind": "oom"},
            },
        ],
        "note": "all in one",
    }


class TestWriting:
    def test_fields_at_their_defaults_are_left_out(self) -> None:
        scenario = scenario_from_json(base())
        assert scenario_to_json(scenario) == base()
        assert json.loads(dumps(scenario)) == base()

    def test_defaults_that_are_made_are_left_out_as_well(self) -> None:
        step = StepTrace(index=3, phase=Phase.EAGER, outcome="ok", substeps=())
        assert to_json(step) == {"index": 3, "phase": "eager", "outcome": "ok", "substeps": []}

    def test_mappings_have_text_keys(self) -> None:
        step = StepTrace(index=0, phase=Phase.EAGER, outcome="ok", substeps=(), sites={"torch.clone": 2})
        assert to_json(step)["sites"] == {"torch.clone": 2}
        assert to_json({7: (1, 2)}) == {"7": [1, 2]}


Change = Callable[[dict[str, Any]], object]

REFUSALS: dict[str, tuple[Change, str]] = {
    "no version": (lambda v: v.pop("version"), "version: is missing; add it; this release reads version 1"),
    "newer version": (lambda v: v.update(version=2), "version: is 2; this release reads version 1"),
    "version true": (lambda v: v.update(version=True), "version: is True; this release reads version 1"),
    "version 1.0": (lambda v: v.update(version=1.0), "version: is 1.0; this release reads version 1"),
    "unknown field": (lambda v: v.update(step=[]), "step: is not a field; did you mean 'steps'?"),
    "unknown field inside": (
        lambda v: v["steps"][1]["contexts"][0].update(chunks=3),
        "steps[1].contexts[0].chunks: is not a field; did you mean 'chunk'?",
    ),
    "unlike any field": (
        lambda v: v["requests"][0].update(zzz=3),
        "requests[0].zzz: is not a field; write one of id, prefix_len, prefix_of, prompt_len, thinking",
    ),
    "missing field": (lambda v: v["steps"][2].pop("draft_len"), "steps[2].draft_len: is missing; add it"),
    "missing configuration": (lambda v: v.pop("config"), "config: is missing; add it"),
    "text for a number": (
        lambda v: v["config"].update(max_draft_len="2"),
        "config.max_draft_len: is a text; write a whole number",
    ),
    "fraction": (
        lambda v: v["steps"][0].update(draft_len=2.0),
        "steps[0].draft_len: is the number 2.0; write a whole number",
    ),
    "true for a number": (
        lambda v: v["config"].update(seed=True),
        "config.seed: is true or false; write a whole number",
    ),
    "null for a number": (lambda v: v["config"].update(seed=None), "config.seed: is null; write a whole number"),
    "number for a text": (lambda v: v.update(note=3), "note: is the number 3; write a text"),
    "list for a text": (
        lambda v: v["steps"][2]["fault"].update(site=[]),
        "steps[2].fault.site: is a list; write a text",
    ),
    "object for a list": (lambda v: v.update(requests={}), "requests: is an object; write a list"),
    "list for an object": (lambda v: v["steps"].insert(1, []), "steps[1]: is a list; write an object"),
    "text for an optional object": (
        lambda v: v["steps"][2].update(fault="oom"),
        "steps[2].fault: is a text; write an object",
    ),
    "text for an optional number": (
        lambda v: v["steps"][2]["generations"][0].update(request="0"),
        "steps[2].generations[0].request: is a text; write a whole number",
    ),
    "unknown phase": (
        lambda v: v["steps"][0].update(phase="captured"),
        "steps[0].phase: 'captured' is not known; did you mean 'capture'?",
    ),
    "number for a phase": (
        lambda v: v["steps"][0].update(phase=1),
        "steps[0].phase: 1 is not known; write one of capture, eager, replay, warmup",
    ),
    "object for a kind": (
        lambda v: v["steps"][2]["fault"].update(kind={}),
        "steps[2].fault.kind: {} is not known; write one of cuda, error, oom",
    ),
    "more than 64 bits": (
        lambda v: v["steps"][1]["contexts"][0].update(chunk=2**63),
        "steps[1].contexts[0].chunk: is a number of more than 64 bits; write a smaller one",
    ),
    "fewer than 64 bits below": (
        lambda v: v["steps"][1]["contexts"][0].update(chunk=-(2**63) - 1),
        "steps[1].contexts[0].chunk: is a number of more than 64 bits; write a smaller one",
    ),
    "what cannot happen": (
        lambda v: v["steps"].pop(1),
        "steps[1].generations[0].request: request 0 still has 3 prompt tokens to compute; "
        "list it under contexts until its prompt is done",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line_that_names_the_field(case: str) -> None:
    change, message = REFUSALS[case]
    value = base()
    change(value)
    with pytest.raises(ScenarioError) as caught:
        loads(json.dumps(value))
    assert str(caught.value) == message


def test_huge_numbers_are_refused_and_never_computed_with() -> None:
    value = base()
    value["steps"][0]["generations"][0]["past"] = int("9" * 4000)
    with pytest.raises(ScenarioError, match=r"^steps\[0\]\.generations\[0\]\.past: is a number of more than 64 bits"):
        loads(json.dumps(value))


class TestText:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "scenario: is not JSON (Expecting value: line 1 column 1 (char 0)); restore it from its source"),
            (
                '{\n  "version": 1,\n}',
                "scenario: is not JSON (",
            ),
            ("[]", "scenario: holds a list; write a JSON object"),
            ("null", "scenario: holds null; write a JSON object"),
            ("7", "scenario: holds the number 7; write a JSON object"),
            ('{"version": NaN}', "scenario: is not JSON (NaN is no number of JSON); restore it from its source"),
            ('{"note": -Infinity}', "scenario: is not JSON (-Infinity is no number of JSON); restore it"),
            ('{"version": 1, "config": 1e999}', "config: is the number inf; write an object"),
        ],
    )
    def test_what_is_no_scenario(self, text: str, message: str) -> None:
        with pytest.raises(ScenarioError) as caught:
            loads(text)
        assert str(caught.value).startswith(message)

    @pytest.mark.parametrize("depth", [33, 400, 100_000])
    @pytest.mark.parametrize("brackets", ["[]", "{}"])
    def test_deep_nesting_is_refused(self, depth: int, brackets: str) -> None:
        opening = "[" if brackets == "[]" else '{"a":'
        text = '{"version": 1, "steps": ' + opening * (depth - 1) + "0" + brackets[1] * (depth - 1) + "}"
        with pytest.raises(ScenarioError) as caught:
            loads(text)
        assert str(caught.value) == "scenario: is nested more than 32 deep; restore it from its source"

    def test_nesting_up_to_the_limit_is_read(self) -> None:
        assert parse('{"a": ' + "[" * 31 + "]" * 31 + "}")["a"] == eval("[" * 31 + "]" * 31)

    def test_a_field_name_from_a_file_cannot_break_the_message(self) -> None:
        with pytest.raises(ScenarioError, match=r"^\?\[2Jx: is not a field"):
            loads('{"version": 1, "\\u001b[2Jx": 1}')

    @given(st.text())
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            loads(text)
        assert str(caught.value).isprintable()

    @given(st.data())
    def test_any_value_in_any_place_is_read_or_refused(self, data: st.DataObject) -> None:
        value = base()
        place: Any = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
                break
            place = place[key]
        leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
        place[key] = data.draw(
            st.recursive(leaves, lambda v: st.lists(v, max_size=2) | st.dictionaries(texts, v, max_size=2))
        )
        result = outcome(json.dumps(value))
        if isinstance(result, ScenarioError):
            assert str(result).isprintable()
        else:
            assert loads(dumps(result)) == result


class TestOtherValues:
    def test_mappings_and_optional_fields_of_other_dataclasses(self) -> None:
        value = {"index": 1, "phase": "replay", "outcome": "ok", "substeps": [], "sites": {"torch.clone": 2}}
        step = from_json(StepTrace, value)
        assert (step.phase, step.sites) == (Phase.REPLAY, {"torch.clone": 2})
        with pytest.raises(ScenarioError, match=r"^sites: is a list; write an object$"):
            from_json(StepTrace, {**value, "sites": []})

    def test_a_flag_is_true_or_false(self) -> None:
        value = {"index": 1, "phase": "replay", "outcome": "ok", "substeps": [], "injected": 1}
        with pytest.raises(ScenarioError, match=r"^injected: is the number 1; write true or false$"):
            from_json(StepTrace, value)
