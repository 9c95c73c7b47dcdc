"""Two ranks of a pipeline: the one without the worker is told what the last one returned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.base import run
from engines.portable.pipeline_session import PipelineSession
from engines.portable.pyexecutor.pipeline import PPRelay
from invariants import verify
from scenarios import WORKERS as TRAITS
from scenarios import Config, Fault, FaultKind, Scenario, ScenarioError, UsageError, check
from tests.engines.portable.scripts import ENGINE
from tests.engines.portable.support import WORKERS
from tests.invariants.cases import served, started_up

ALONE = [worker for worker in WORKERS if not TRAITS[worker].tree]
CONFIG = Config(worker=ALONE[0], max_draft_len=2, pp_size=2)


def piped(scenario: Scenario) -> Scenario:
    return check(replace(scenario, config=replace(scenario.config, pp_size=2)))


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("worker", ALONE)
def test_what_a_rank_without_the_worker_prepares_is_what_the_oracle_expects(worker: str) -> None:
    for scenario in (served(worker), started_up(worker)):
        verdict = verify(piped(scenario), lambda of: run(ENGINE, of), relations=False)
        assert verdict.violations == ()
        assert verdict.counts["layout-equals-reference"][0] > 0


def test_what_is_prepared_and_made_of_a_step_is_the_other_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = PPRelay.receive

    def first_count_alone(self: PPRelay, placeholders: Any) -> Any:
        told = receive(self, placeholders)
        return {**told, "new_tokens_lens": told["new_tokens_lens"].clamp(max=1)}

    monkeypatch.setattr(PPRelay, "receive", first_count_alone)
    scenario = served(ALONE[0])
    alone, shown = run(ENGINE, scenario), run(ENGINE, piped(scenario))
    differing = {
        (mine.name, field)
        for step, other in zip(alone.steps, shown.steps)
        for mine, theirs in zip(step.substeps, other.substeps)
        for field in mine.fields
        if mine[field] != theirs[field]
    }
    assert {("prepared", "kv_lens_cuda"), ("prepared", "position_ids"), ("updated", "emitted")} <= differing
    assert {name for name, _ in differing} == {"prepared", "updated"}


def test_a_rank_waits_for_no_step_that_the_last_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = piped(served(ALONE[0]))
    session = ENGINE.open(scenario.config, scenario.requests)
    assert isinstance(session, PipelineSession)
    assert session.step(scenario.steps[0]).outcome == "ok"

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(session._last.model_engine, "forward", broken)
        assert session.step(scenario.steps[1]).outcome == "tolerated"
    trace = session.trace()
    session.close()
    assert [step.outcome for step in trace.steps] == ["ok", "tolerated"]
    assert len(session._other.trace().steps) == 1


def test_what_was_sent_does_not_change_when_the_last_rank_writes_into_its_outputs() -> None:
    relay, outputs = PPRelay(), {"logits": torch.zeros(1), "new_tokens_lens": torch.ones(2)}
    relay.send(outputs)
    outputs["new_tokens_lens"].fill_(7)
    told = relay.receive({"logits": torch.ones(1), "new_tokens_lens": torch.zeros(2)})
    assert {name: tensor.tolist() for name, tensor in told.items()} == {"logits": [1], "new_tokens_lens": [1, 1]}


@pytest.mark.parametrize("worker", sorted(worker for worker in WORKERS if TRAITS[worker].tree))
def test_trees_are_told_to_no_other_rank(worker: str) -> None:
    with pytest.raises(ScenarioError, match=r"config\.pp_size: how the drafts of .* hang together .*; leave it out"):
        piped(served(worker))


def test_a_step_with_other_ranks_waiting_may_not_fail() -> None:
    scenario = piped(served(ALONE[0]))
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    failing = replace(scenario, steps=(replace(scenario.steps[0], fault=fault, finish=()), *scenario.steps[1:]))
    with pytest.raises(ScenarioError, match=r"steps\[0\]\.fault: the other ranks .* would wait .*; remove it or"):
        check(failing)


def test_checks_on_the_device_follow_one_rank() -> None:
    unused: Any = None
    with pytest.raises(UsageError, match=r"config\.pp_size: checks on the device follow one rank; leave it out"):
        ENGINE.open_checked(CONFIG, (), unused, unused)
