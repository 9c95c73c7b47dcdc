"""Doing a unit of work. Imports Hypothesis and the strategies, which those who only plan do without."""

from __future__ import annotations

import fuzz.engines
from engines.base import Engine, run
from fuzz.audit import SUITE_ERRORS, crash
from fuzz.events import Events, HarnessError, UnitFinished, UnitRefused
from fuzz.journal import Journal
from fuzz.search import Search
from fuzz.small import small_scenario
from fuzz.sweep import Sweep
from fuzz.unit import Unit
from museum import seeded
from scenarios import UsageError

_warm: set[tuple[str, str]] = set()
"""Engines and devices that have run something in this process."""


def _warm_up(unit: Unit, engine: Engine) -> None:
    """Torch imports much of itself in the first capture; no defect should be charged for that."""
    if (unit.engine, unit.device) not in _warm:
        _warm.add((unit.engine, unit.device))
        run(engine, small_scenario(unit.worker), observe=False)


def run_unit(unit: Unit, journal: Journal | None = None) -> Events:
    """Search one unit; the last event is ``UnitFinished``.

    ``journal`` is told each case before it runs. What goes wrong becomes an event, so that an executor need not
    carry exceptions over: ``UnitRefused`` if the unit cannot run here, ``HarnessError`` for anything else.
    """
    try:
        engine = fuzz.engines.load(unit.engine, unit.device)
        if unit.bug is not None:
            _warm_up(unit, engine)
        with seeded(unit.bug):
            search = Search(unit, engine, journal) if unit.slice is None else Sweep(unit, unit.slice, engine, journal)
            yield from search.events()
    except UsageError as error:
        yield UnitRefused(message=str(error))
    except SUITE_ERRORS as error:
        failure = crash(error)
        yield HarnessError(worker=unit.worker, bug=unit.bug, key=failure.key, message=failure.message)
    yield UnitFinished(worker=unit.worker, bug=unit.bug)
