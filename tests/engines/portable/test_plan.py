"""Which steps of a session are checked, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from engines.portable.plan import Plan
from scenarios import Config, Context, Fault, FaultKind, Generation, Phase, Request, ScenarioError, Schedule, Step

CONFIG = Config(worker="Eagle3OneModelWorker", max_draft_len=2)
REQUEST = Request(id=0, prompt_len=3)
PREFILL = Step(draft_len=2, contexts=(Context(request=0, chunk=3),))
GENERATE = Step(draft_len=2, generations=(Generation(request=0),))
STRANGE = Step(draft_len=2, generations=(Generation(request=1),))


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fields of the steps that were checked."""
    fields: list[str] = []
    advance = Schedule.advance

    def noted(self: Schedule, step: Step, field: str = "step") -> object:
        fields.append(field)
        return advance(self, step, field)

    monkeypatch.setattr(Schedule, "advance", noted)
    return fields


def test_foreseen_steps_are_checked_once(advanced: list[str]) -> None:
    plan = Plan(CONFIG, (REQUEST,))
    plan.foresee([PREFILL, GENERATE], 0)
    assert advanced == ["steps[0]", "steps[1]"]
    plan.take(PREFILL, 0)
    plan.take(GENERATE, 1)
    assert len(advanced) == 2


def test_a_step_that_could_not_come_is_refused_when_it_is_foreseen() -> None:
    with pytest.raises(ScenarioError, match=r"steps\[4\].*no request has id 1"):
        Plan(CONFIG, (REQUEST,)).foresee([PREFILL, STRANGE], 3)


def test_others_than_the_foreseen_ones_are_checked_when_they_come() -> None:
    plan = Plan(CONFIG, (REQUEST,))
    plan.foresee([PREFILL, GENERATE, GENERATE], 0)
    plan.take(PREFILL, 0)
    equal = replace(GENERATE)
    plan.take(equal, 1)
    with pytest.raises(ScenarioError, match=r"steps\[2\].*no request has id 1"):
        plan.take(STRANGE, 2)


def test_a_request_that_is_added_is_known_from_then_on() -> None:
    plan = Plan(CONFIG, (REQUEST,))
    plan.foresee([PREFILL, GENERATE], 0)
    plan.take(PREFILL, 0)
    plan.add(Request(id=1, prompt_len=1))
    plan.take(Step(draft_len=2, contexts=(Context(request=1, chunk=1),), generations=GENERATE.generations), 1)


def test_what_is_behind_an_end_is_refused_only_if_it_comes() -> None:
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.CUDA)
    capture = Step(draft_len=2, phase=Phase.CAPTURE, generations=(Generation(request=None, past=3),), fault=fault)
    plan = Plan(CONFIG, (REQUEST,))
    plan.foresee([capture, PREFILL], 0)
    plan.take(capture, 0)
    with pytest.raises(ScenarioError, match=r"steps\[1\].*an earlier fault ended the run"):
        plan.take(PREFILL, 1)
    plan.leave()
    plan.take(PREFILL, 1)
