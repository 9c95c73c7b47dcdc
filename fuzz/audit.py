"""Whether a run was sound: a planned fault that did not strike as planned is an error of the suite, never a pass.

And whether it would have ended the process, see ``surviving``.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import faults
from scenarios import Scenario, Step, StepTrace, Trace

SUITE_ERRORS: Final = (Exception, faults.HarnessError)
"""What comes out of an engine or a verification only when the suite itself is wrong."""
PROCESS_SURVIVES: Final = "process-survives"
"""Slug of the invariant that is violated when a process dies: it can be asked only from outside."""
PROCESS_SURVIVES_STATEMENT: Final = "No scenario ends the process that runs it, or hangs it."
FAULT_SURFACES: Final = "fault-surfaces"
"""Asked whatever else is: without it, a fault that the engine swallows would pass for a success."""


@dataclass(frozen=True)
class Failure:
    """Why a case failed: a violated invariant, or (``harness``) something that went wrong in the suite itself.

    Equal keys are one failure; the key of a violation is the slug of its invariant.
    """

    key: str
    message: str = ""
    harness: bool = False


class ProcessEnded(Exception):
    """The engine raised what ends a process, ``SystemExit`` for instance. ``raised_at`` is the place, file:line."""

    def __init__(self, error: BaseException) -> None:
        self.raised_at = faults.raised_at(error)
        text = " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())
        super().__init__(f"{text} (at {self.raised_at}) ends the process that runs this scenario")


@contextmanager
def surviving() -> Iterator[None]:
    """A block that runs an engine: what is no ``Exception`` and not the suite's own becomes a ``ProcessEnded``.

    Of Ctrl-C only the main process hears, see ``fuzz.executors.serve``: elsewhere the engine has raised it.
    """
    try:
        yield
    except SUITE_ERRORS:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and multiprocessing.parent_process() is None:
            raise
        raise ProcessEnded(error) from error


def planned_faults(scenario: Scenario, trace: Trace) -> Iterator[tuple[Step, StepTrace]]:
    """Steps with a planned fault that the run reached, with what happened in them."""
    for step, done in zip(scenario.steps, trace.steps):
        if step.fault is not None:
            yield step, done


def audit(scenario: Scenario, trace: Trace) -> Failure | None:
    """What is unsound about the run; None for a sound one.

    That a fault was raised and then swallowed or replaced is the engine's doing: the invariant ``FAULT_SURFACES``.
    """
    for step, done in planned_faults(scenario, trace):
        if done.fired != 1:
            assert step.fault is not None
            how = "did not fire" if done.fired == 0 else f"fired {done.fired} times"
            message = f"steps[{done.index}]: the planned fault {step.fault} {how}"
            return Failure(f"{step.fault.site} {how}", message, harness=True)
    return None


def crash(error: BaseException) -> Failure:
    """An exception of the suite itself, in one line with the innermost place it passed; or an engine's end."""
    if isinstance(error, ProcessEnded):
        return Failure(PROCESS_SURVIVES, str(error))
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} at {place.filename}:{place.lineno}"
    return Failure(where, " ".join(f"{where}: {error}".split()), harness=True)


def unexpected(error: BaseException) -> str:
    """A fault of the suite or of the machine, in one line: it is no finding."""
    return f"{type(error).__name__}: {error} (at {faults.raised_at(error)}); this is no finding, please report it"


def raised_at(trace: Trace) -> str | None:
    """file:line of the first exception that was not planned; None if there was none.

    Where a planned fault was raised says nothing about what is wrong; the scenario names its site.
    """
    for step in trace.steps:
        failed = None if step.injected else step.find("failed")
        if failed is not None:
            place: str | None = failed.fields.get("raised_at")
            return place
    return None
