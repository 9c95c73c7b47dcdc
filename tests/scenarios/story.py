"""Two requests and the steps that they live through, for tests of the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scenarios import Config, Context, Fault, FaultKind, Generation, Phase, Request, Scenario, Step

EAGLE = Config(worker="Eagle3OneModelWorker", max_draft_len=3)
PARD = Config(worker="PARDWorker", max_draft_len=3)
REQUESTS = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=3))


def prefill(*requests: int, k: int = 3, agree: int = 0, **more: Any) -> Step:
    lens = {0: 5, 1: 3}
    return Step(draft_len=k, contexts=tuple(Context(request=r, chunk=lens[r], agree=agree) for r in requests), **more)


def decode(*requests: int, k: int = 3, agree: int = 0, **more: Any) -> Step:
    return Step(draft_len=k, generations=tuple(Generation(request=r, agree=agree) for r in requests), **more)


def dummies(*pasts: int, phase: Phase = Phase.CAPTURE, k: int = 3, **more: Any) -> Step:
    rows = tuple(Generation(request=None, past=past) for past in pasts)
    return Step(phase=phase, draft_len=k, generations=rows, **more)


def fault(kind: FaultKind = FaultKind.ERROR, site: str = "draft_model.forward", occurrence: int = 1) -> Fault:
    return Fault(site=site, occurrence=occurrence, kind=kind)


def scenario(*steps: Step, config: Config = EAGLE, requests: Iterable[Request] = REQUESTS) -> Scenario:
    return Scenario(config=config, requests=tuple(requests), steps=steps)


START = prefill(0)
