"""Events and units cross between processes and machines as JSON."""

from __future__ import annotations

import pytest

from fuzz import unit
from fuzz.events import (
    BatchFinished,
    CampaignFinished,
    CampaignStarted,
    Event,
    FindingFound,
    HarnessError,
    Progress,
    Tally,
    UnitFinished,
    UnitRefused,
    WorkerDied,
    decode,
    encode,
)
from fuzz.scope import Scope, Slice
from scenarios import Config, Context, Finding, Request, Scenario, Step, Violation

SLICE = Slice(scope=Scope(max_batch=2, max_draft_len=3, steps=1), number=4, of=9, done=7)
SCENARIO = Scenario(
    config=Config(worker="MTPEagleWorker", max_draft_len=2),
    requests=(Request(id=0, prompt_len=3),),
    steps=(Step(draft_len=1, contexts=(Context(request=0, chunk=3, agree=1),)),),
)
FINDING = Finding(
    invariant="restored-layout",
    engine="portable",
    device="cpu",
    scenario=SCENARIO,
    violation=Violation(invariant="restored-layout", step=0, substep="restored", field="num_contexts", expected=1),
    bug="TRT-03/MTPEagleWorker",
    raised_at="speculative/mtp.py:12",
)


@pytest.mark.parametrize(
    "event",
    [
        CampaignStarted(command="run", engine="portable", device="cpu", workers=("PARDWorker",), seed=3, cases=9),
        CampaignStarted(command="fuzz", engine="portable", device="cpu", workers=(), seed=3, seconds=1.5),
        BatchFinished(
            worker="PARDWorker",
            tally=Tally(cases=1, steps=2, seconds=0.5, reached={"a": 3}, held={"a": 2}, observed=("num_tokens",)),
        ),
        BatchFinished(
            worker="PARDWorker",
            tally=Tally(cases=7),
            progress=Progress(slice=SLICE, complete=True, points={"": 2, "a": 5}, fired={"a": 5}, refused=3),
        ),
        FindingFound(finding=FINDING, cases=4, also=("output-lossless",)),
        HarnessError(worker="PARDWorker", key="k", message="m", scenario=SCENARIO, bug="TRT-01/PARDWorker"),
        WorkerDied(worker="PARDWorker", cause="was killed by SIGKILL", killed=True),
        UnitRefused(message="--device: no cuda here"),
        UnitFinished(worker="PARDWorker"),
        CampaignFinished(seconds=2.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_survives_its_journey(event: Event) -> None:
    assert decode(encode(event)) == event


def test_a_unit_survives_its_journey() -> None:
    sent = unit.Unit(
        engine="portable",
        device="cuda",
        worker="PARDWorker",
        seed=5,
        max_cases=10,
        max_seconds=2.5,
        faults=("seams", "torch"),
        invariants=("output-lossless",),
        exclude=("restored-layout",),
        max_draft_len=3,
        bug="TRT-01/PARDWorker",
        first=True,
        lane=2,
        slice=SLICE,
    )
    assert unit.decode(unit.encode(sent)) == sent


def test_tallies_add_up() -> None:
    one = Tally(cases=1, steps=2, seconds=0.5, planned=2, fired=1, reached={"a": 3}, held={"a": 2}, observed=("x",))
    other = Tally(cases=2, steps=3, seconds=1.0, planned=1, fired=1, reached={"a": 1, "b": 4}, held={"b": 4})
    assert one + other == Tally(
        cases=3,
        steps=5,
        seconds=1.5,
        planned=3,
        fired=2,
        reached={"a": 4, "b": 4},
        held={"a": 2, "b": 4},
        observed=("x",),
    )
