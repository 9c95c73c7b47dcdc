"""What the invariants leave open of a drafter's own context, and of the pages that it does not read."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from invariants import verify
from scenarios import Config, Fault, FaultKind, Generation, Phase, Scenario, Step, Substep, check
from tests.invariants.cases import DFLASH, failing, started_up
from tests.invariants.synthetic import dressed, edit, edit_step

ROLLED_BACK = "ctx-len-rolled-back"


def _captured(max_draft_len: int, dummy: Generation, fault: Fault | None = None) -> Scenario:
    step = Step(phase=Phase.CAPTURE, draft_len=max_draft_len, generations=(dummy,), fault=fault)
    return check(Scenario(config=Config(worker=DFLASH, max_draft_len=max_draft_len), steps=(step,)))


def test_columns_stay_advanced_when_the_failure_comes_after_the_forward() -> None:
    scenario = failing(DFLASH)
    steps = (scenario.steps[1], replace(scenario.steps[2], fault=None))
    clean = dressed(replace(scenario, steps=steps)).steps[1]
    entered, restored = (next(clean.named(name))["ctx_len"] for name in ("entered", "restored"))
    assert entered != restored
    for left, violated in ((restored, []), (entered, [2])):
        failed = Substep("failed", 0, "eager", {"ctx_len": left})
        trace = edit_step(dressed(scenario), 2, substeps=(*clean.substeps[:-1], failed))
        verdict = verify(scenario, lambda _, trace=trace: trace, only=[ROLLED_BACK])
        assert [v.step for v in verdict.violations] == violated


def test_a_capture_that_fails_need_not_roll_columns_back() -> None:
    dummy = Generation(request=None, past=3, accept=2)
    scenario = _captured(3, dummy, Fault(site="draft_model.forward", occurrence=3, kind=FaultKind.OOM))
    clean = dressed(_captured(3, dummy)).steps[0].substeps
    begun = takewhile(lambda substep: substep.key != ("restored", 2), clean)
    failed = Substep("failed", 0, "graph_warmup", {"ctx_len": [9]})
    trace = edit_step(dressed(scenario), 0, substeps=(*begun, failed))
    verdict = verify(scenario, lambda _: trace, only=[ROLLED_BACK])
    assert (verdict.violations, verdict.counts[ROLLED_BACK]) == ((), (2, 2))


def test_the_draft_call_does_not_reach_into_pages() -> None:
    """It is one token beyond the target's forward, which for Kmax 1 is more than a dummy is granted."""
    scenario = _captured(1, Generation(request=None, past=2))
    verdict = verify(scenario, dressed)
    assert verdict.violations == ()
    assert verdict.counts["kv-lens-within-pages"] == (3, 3)


def test_what_is_kept_for_dummies_may_depend_on_earlier_ones() -> None:
    scenario = started_up(DFLASH)
    trace = dressed(scenario)
    for run in range(2):
        for name in ("entered", "restored"):
            trace = edit(trace, 1, name, "ctx_len", lambda _: [5, 5], run)
    verdict = verify(scenario, lambda s: trace if s == scenario else dressed(s))
    assert verdict.violations == ()
    assert verdict.counts["startup-leaves-no-trace"][0] > 0
