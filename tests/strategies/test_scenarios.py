"""Every scenario drawn is one that the executor could live through, and nothing is rejected on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import Phase as Part
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.statistics import collector

from scenarios import Config, Phase, Scenario, Schedule, check, dumps, loads
from strategies import configs, faulted_scenarios, scenarios
from strategies.composer import Composer

SITES = {"model_engine.prepare_inputs": 1, "draft_model.forward": 3}
SMALLEST = (
    Config(worker="PARDWorker", max_draft_len=1, max_num_tokens=1),
    Config(worker="MTPEagleWorker", max_draft_len=1, tokens_per_block=1, num_blocks=1, max_num_requests=1),
    Config(worker="MTPEagleWorker", max_draft_len=2, tokens_per_block=1, num_blocks=9, max_seq_len=3),
    Config(worker="PARDWorker", max_draft_len=1, num_blocks=1, tokens_per_block=3, max_seq_len=2),
)


def record(scenario: Scenario) -> Mapping[str, int]:
    """Sites of the last step: none while a graph is replayed. What is to be recorded must be valid."""
    last = check(scenario).steps[-1]
    assert last.fault is None
    assert not last.finish
    return {} if last.phase is Phase.REPLAY else SITES


@settings(max_examples=120)
@given(scenarios(backends=["TRTLLM", "DSA"], max_steps=7))
def test_clean(scenario: Scenario) -> None:
    assert check(scenario) is scenario
    assert loads(dumps(scenario)) == scenario
    assert len(scenario.steps) <= 7
    assert not any(step.fault for step in scenario.steps)


@settings(max_examples=120)
@given(faulted_scenarios(record=record, max_steps=6))
def test_faulted(scenario: Scenario) -> None:
    assert check(scenario) is scenario
    assert loads(dumps(scenario)) == scenario
    assert len(scenario.steps) <= 6
    failing = [i for i, step in enumerate(scenario.steps) if step.fault]
    for i in failing:
        fault = scenario.steps[i].fault
        assert fault is not None
        assert fault.occurrence <= SITES[fault.site]
        schedule = Schedule(scenario.config, scenario.requests)
        for step in scenario.steps[: i + 1]:
            schedule.advance(step)
        # What is not tolerated ends the run. Another step follows what is, but where it might be one failure too many.
        last = i == len(scenario.steps) - 1
        assert last or not schedule.over
        assert schedule.over or not last or len(failing) > scenario.config.error_budget


@pytest.mark.exhaustive(every=3, first=1)
@pytest.mark.parametrize("config", SMALLEST)
@pytest.mark.parametrize("faulted", [False, True])
def test_the_smallest_configurations(config: Config, faulted: bool) -> None:
    options: dict[str, Any] = {"config": config, "max_steps": 12}
    strategy = faulted_scenarios(record=record, **options) if faulted else scenarios(**options)
    longest = 0

    @settings(max_examples=40)
    @given(strategy)
    def look(scenario: Scenario) -> None:
        nonlocal longest
        check(scenario)
        longest = max(longest, len(scenario.steps))

    look()
    # A failure may end a scenario, and most of those in which steps fail are short.
    assert longest >= 10


@given(scenarios(config=configs(workers=["PARDWorker"], max_draft_len=2), max_steps=4, with_startup=False))
def test_options(scenario: Scenario) -> None:
    assert scenario.config.worker == "PARDWorker"
    assert scenario.config.max_draft_len <= 2
    assert all(step.phase is Phase.EAGER for step in scenario.steps)


@pytest.mark.parametrize("strategy", [scenarios(), faulted_scenarios(record=record)])
def test_nothing_is_rejected(strategy: st.SearchStrategy[Scenario]) -> None:
    @settings(max_examples=100, phases=[Part.generate])
    @given(strategy)
    def look(scenario: Scenario) -> None: ...

    runs: list[Any] = []
    statistics: Any = collector
    with statistics.with_value(runs.append):
        look()
    statuses = [case["status"] for case in runs[0]["generate-phase"]["test-cases"]]
    # Hypothesis's own mutations may overrun; nothing that the strategies do makes a case invalid.
    assert statuses.count("valid") == 100
    assert "invalid" not in statuses


def test_a_step_without_sites_is_clean_and_leaves_no_dead_end() -> None:
    seen = 0

    @settings(max_examples=30)
    @given(faulted_scenarios(record=lambda _: {}, max_steps=6))
    def look(scenario: Scenario) -> None:
        nonlocal seen
        check(scenario)
        assert not any(step.fault for step in scenario.steps)
        seen += len(scenario.steps) == 6

    look()
    assert seen


@given(st.data())
def test_a_composer_never_comes_to_a_dead_end(data: st.DataObject) -> None:
    composer = Composer(data.draw(configs(max_draft_len=3)), startup=2)
    for _ in range(12):
        composer.draw_step(data.draw)
    assert len(check(composer.scenario()).steps) == 12
