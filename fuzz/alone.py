"""Running one case in a process of its own, and how that ends."""

from __future__ import annotations

import multiprocessing
import signal

import fuzz.engines
from engines.base import run
from fuzz.audit import SUITE_ERRORS
from fuzz.journal import Case
from invariants import verify
from museum import seeded
from scenarios import dumps, loads


def death(case: Case, seconds: float) -> str | None:
    """Run a case in a process of its own, for ``seconds`` at most; how that ended, None if it survived."""
    process = multiprocessing.get_context("spawn").Process(
        target=run_once, args=(case.engine, case.device, case.bug, dumps(case.scenario))
    )
    process.start()
    try:
        process.join(seconds)
        if process.exitcode is None:
            return f"the process did not end within {seconds:g} s"
    finally:
        # Without effect on one that has ended.
        process.kill()
        process.join()
    return f"the process {how_it_ended(process.exitcode)}" if process.exitcode else None


def run_once(engine: str, device: str, bug: str | None, scenario: str) -> None:
    """Body of the process: run the scenario, given as JSON, and what invariants compare it with; look at nothing."""
    under_test = fuzz.engines.load(engine, device)
    try:
        with seeded(bug):
            verify(loads(scenario), lambda twin: run(under_test, twin))
    except SUITE_ERRORS:
        pass  # no death


def how_it_ended(code: int) -> str:
    """The exit status of a process in words that follow "the process"."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
