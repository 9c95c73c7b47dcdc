"""Engines made of the oracle and one defect each: what a campaign is tested with, where torch need not be."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import reference
from scenarios import Config, Request, Step, StepTrace, Trace

SITES = {"draft_model.forward": 2, "worker.sample_draft_tokens": 1}


class Session:
    """Does what the oracle says, until a subclass of ``Sound`` tampers with it."""

    def __init__(self, engine: Sound, config: Config, requests: tuple[Request, ...], record: Collection[str]) -> None:
        self._engine = engine
        self._config = config
        self._oracle = reference.Session(config, requests)
        self._record = record
        self._steps: list[StepTrace] = []

    def add(self, request: Request) -> None:
        self._oracle.add(request)

    def step(self, step: Step) -> StepTrace:
        done = self._oracle.step(step)
        # In a failing step the oracle shows what a clean one would, too.
        seen = [s for s in done.substeps if step.fault is None or s.name != "updated"]
        done = replace(done, substeps=tuple(seen), sites=SITES if self._record else {})
        done = self._engine.tamper(self._config, step, done)
        self._steps.append(done)
        return done

    def trace(self) -> Trace:
        classes = {"forward_defined_in": ["SpecWorkerBase"]}
        return Trace("fake", self._engine.device, tuple(self._steps), classes)

    def close(self) -> None:
        pass


class Sound:
    """An engine without a defect."""

    name = "fake"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def open(
        self,
        config: Config,
        requests: tuple[Request, ...] = (),
        *,
        observe: bool = True,
        record: Collection[str] = (),
    ) -> Session:
        return Session(self, config, requests, record)

    def tamper(self, config: Config, step: Step, done: StepTrace) -> StepTrace:
        return done
