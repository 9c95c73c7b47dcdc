"""Engines made of the oracle and one defect each: what a campaign is tested with, where torch need not be.

They are named on command lines as ``tests.fuzz.fakes:Sound`` and so also exist in spawned processes.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import replace

import reference
from scenarios import Config, Phase, Request, Step, StepTrace, Substep, Trace, UsageError

SITES = {"draft_model.forward": 2, "worker.sample_draft_tokens": 1}


class Session:
    """Does what the oracle says, until its engine tampers with it."""

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
        done = self._engine.tamper(step, done)
        self._steps.append(done)
        return done

    def trace(self) -> Trace:
        classes = {"forward_defined_in": ["SpecWorkerBase"]}
        return Trace("fake", self._engine.device, tuple(self._steps), classes)

    def close(self) -> None:
        pass


class Sound:
    """Has no defect."""

    name = "fake"
    backends = ("TRTLLM",)

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

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        return done


def edit(done: StepTrace, name: str, **fields: object) -> StepTrace:
    """The step with other values in the sub-steps of that name."""
    substeps = [Substep(s.name, s.run, s.phase, {**s.fields, **fields}) if s.name == name else s for s in done.substeps]
    return replace(done, substeps=tuple(substeps))


def mixed(step: Step) -> bool:
    """Whether the step is served, mixes contexts with generations and is not meant to fail."""
    return bool(step.contexts and step.generations) and not step.phase.is_startup and step.fault is None


class Forgetful(Sound):
    """Leaves ``num_contexts`` at 0 after a mixed batch, and thereby breaks several invariants (PR #17381)."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        return edit(done, "restored", num_contexts=0) if mixed(step) else done


class Twofold(Sound):
    """Has two defects that have nothing to do with each other."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if len(step.contexts) > 1:
            done = edit(done, "prepared", gather_ids=[])
        return edit(done, "updated", free_blocks=-1) if step.draft_len > 2 else done


class Stingy(Sound):
    """Has no page left after the replay of a graph."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        return edit(done, "updated", free_blocks=0) if step.phase is Phase.REPLAY else done


class Dying(Sound):
    """Ends its process, as a segmentation fault would, in the first mixed batch."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if mixed(step):
            os.kill(os.getpid(), signal.SIGSEGV)
        return done


class Quitting(Sound):
    """Ends its process without a word in the first mixed batch."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if mixed(step):
            os._exit(0)
        return done


class Exiting(Sound):
    """Raises ``SystemExit`` in a mixed batch."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if mixed(step):
            sys.exit("enough")
        return done


class Killed(Sound):
    """Is killed in a mixed batch, as where memory is short."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if mixed(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return done


class Stillborn(Sound):
    """Ends its process before it has run anything."""

    def __init__(self, device: str = "cpu") -> None:
        os._exit(7)


class Stopping(Sound):
    """Has a breakpoint in a mixed batch, and takes an exception there for a failure of the step."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if not mixed(step):
            return done
        try:
            breakpoint()  # noqa: T100 - a person's, which is what this engine is for
        except Exception as error:
            return replace(done, substeps=(Substep("failed", 0, "eager", {"exception": type(error).__name__}),))
        return done


class Hanging(Sound):
    """Never comes back from a mixed batch."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if mixed(step):
            time.sleep(600)
        return done


class Slow(Sound):
    """Takes its time, so that it can be interrupted."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        time.sleep(0.02)
        return done


class Silent(Sound):
    """Does not raise planned faults."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        return done if step.fault is None else replace(done, fired=0, injected=False)


class Swallowing(Sound):
    """Catches planned faults and goes on."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if step.fault is None:
            return done
        return replace(
            done, outcome="ok", injected=False, substeps=tuple(s for s in done.substeps if s.name != "failed")
        )


class Crashing(Sound):
    """Is itself wrong: raises, where an engine reports."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if step.generations:
            raise KeyError("no such row")
        return done


class Unrecordable(Sound):
    """Raises as soon as sites are to be recorded."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if done.sites:
            raise KeyError("no such site")
        return done


class Fickle(Sound):
    """Breaks an invariant the first time that it sees a mixed batch and never again."""

    batches = itertools.count()

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if mixed(step) and next(self.batches) == 0:
            return edit(done, "restored", num_contexts=0)
        return done


class Interrupted(Sound):
    """Presses Ctrl-C in a mixed batch."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        if mixed(step):
            raise KeyboardInterrupt
        return done


class Choosy(Sound):
    """Cannot drive every configuration."""

    def open(
        self,
        config: Config,
        requests: tuple[Request, ...] = (),
        *,
        observe: bool = True,
        record: Collection[str] = (),
    ) -> Session:
        if config.max_draft_len > 1:
            raise UsageError(f"config.max_draft_len: {config.max_draft_len} is more than this engine has; write 1")
        return super().open(config, requests, observe=observe, record=record)


class Unwilling(Sound):
    """Cannot drive any step."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        raise UsageError("config.worker: this engine has none; name another one")


class Refusing(Sound):
    """Cannot run on this machine."""

    def __init__(self, device: str = "cpu") -> None:
        raise UsageError("--engine: this engine needs another machine; use that one")


class OnlyOnCuda(Forgetful):
    """As ``Forgetful``, and only on a GPU."""

    def tamper(self, step: Step, done: StepTrace) -> StepTrace:
        return super().tamper(step, done) if self.device == "cuda" else done
