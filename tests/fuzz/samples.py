"""Scenarios, findings and events that several tests look at."""

from __future__ import annotations

from fuzz.events import BatchFinished, CampaignFinished, CampaignStarted, Event, FindingFound, Tally
from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Finding,
    Generation,
    Phase,
    Request,
    Scenario,
    Step,
    Violation,
    check,
    dumps,
)

MIXED = check(
    Scenario(
        config=Config(worker="MTPEagleWorker", max_draft_len=2, num_blocks=16),
        requests=(Request(id=0, prompt_len=3), Request(id=1, prompt_len=5)),
        steps=(
            Step(
                phase=Phase.WARMUP,
                draft_len=2,
                contexts=(Context(request=None, chunk=4),),
                generations=(Generation(request=None, past=3, accept=2),),
                fault=Fault(site="draft_model.forward", occurrence=2, kind=FaultKind.OOM),
            ),
            Step(draft_len=2, contexts=(Context(request=0, chunk=3, agree=2),)),
            Step(
                draft_len=1,
                contexts=(Context(request=1, chunk=5),),
                generations=(Generation(request=0, agree=1),),
                finish=(0,),
            ),
        ),
    )
)
"""A tolerated failure in warm-up, a context, a mixed batch."""

FINDING = Finding(
    invariant="restored-layout",
    engine="tests.fuzz.fakes:Forgetful",
    device="cpu",
    scenario=MIXED,
    violation=Violation(
        invariant="restored-layout",
        step=2,
        substep="restored",
        field="num_contexts",
        expected=1,
        actual=0,
        message="num_contexts is 0 and should be 1: so it was at prepared",
    ),
    raised_at="speculative/mtp.py:12",
)


def size(scenario: Scenario) -> tuple[int, int, int, str]:
    """Order of scenarios by how much there is to read in them."""
    text = dumps(scenario)
    return len(scenario.steps), sum(len(step.rows) for step in scenario.steps), len(text), text


def events(*more: Event, workers: tuple[str, ...] = ("MTPEagleWorker", "PARDWorker")) -> list[Event]:
    """A campaign in which all went well, and ``more`` before its end."""
    tally = Tally(
        cases=10,
        steps=31,
        seconds=0.25,
        planned=4,
        fired=4,
        reached={"restored-layout": 120, "output-lossless": 31},
        held={"restored-layout": 120, "output-lossless": 31},
        observed=("emitted", "num_contexts"),
    )
    return [
        CampaignStarted(command="run", engine="portable", device="cpu", workers=workers, seed=7, cases=20),
        *(BatchFinished(worker=worker, tally=tally) for worker in workers),
        *more,
        CampaignFinished(seconds=0.5),
    ]


FOUND = FindingFound(finding=FINDING, cases=6, also=("derived-counters-consistent", "layout-equals-reference"))
