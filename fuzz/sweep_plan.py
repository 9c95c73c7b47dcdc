"""The plan of a sweep: which slices are left, in what order, and what earlier runs of the same sweep have seen.

The events of its slices are kept as they happen, so that a sweep that was cut short goes on as if it had not been: its
report and exit status are those of the whole. A sweep that is complete begins anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from engines.upstream import SOURCE_VARIABLE
from fuzz.campaign import DEATHS
from fuzz.events import BatchFinished, Event, FindingFound, HarnessError, UnitFinished, WorkerDied
from fuzz.scope import Slice
from fuzz.store import Store
from fuzz.unit import Unit, encode

UNIT_POINTS: Final = 200
"""Most points of one unit; what a larger slice has left is for the next one."""


@dataclass
class _Line:
    """The slices of one worker, of which several may run at a time.

    left   slices with points left, by number
    busy   how many points the units of those that are running may still take
    aside  those that are left for another run of the sweep, as they came to nothing in this one
    """

    unit: Unit
    key: str
    slices: int
    left: dict[int, Slice]
    busy: dict[int, int] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    deaths: int = 0

    @property
    def next(self) -> int | None:
        """The first slice that can start, None if none can."""
        if self.deaths >= DEATHS:
            return None
        return next((n for n in self.left if n not in self.busy and n not in self.aside), None)

    def hear(self, event: Event) -> None:
        """Take note of what a slice has done or found, now or in an earlier run."""
        if isinstance(event, BatchFinished) and event.progress is not None:
            part = event.progress.slice
            self.left[part.number] = part
            if event.progress.complete:
                del self.left[part.number]
        elif isinstance(event, FindingFound):
            self.known.update((event.finding.invariant, *event.also))
        elif isinstance(event, HarnessError):
            self.known.add(event.key)


class Slices:
    """Hands out slices, the same part of each worker before the next part of any.

    units    one per worker, with its first slice; otherwise as they will be
    points   most points to run, None without such a limit
    seconds  when to stop, None likewise
    again    whether to start over, where an earlier run has left something to do
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        *,
        points: int | None = None,
        seconds: float | None = None,
        again: bool = False,
    ) -> None:
        self._store = store
        self._points = points
        self._until = None if seconds is None else time.monotonic() + seconds
        self._lines = [_line(unit, i) for i, unit in enumerate(units)]
        self.past = [event for line in self._lines for event in store.noted(line.key)]
        """What earlier runs of this sweep have seen."""
        for line in self._lines:
            for event in store.noted(line.key):
                line.hear(event)
        if again or not any(line.left for line in self._lines):
            for line in self._lines:
                store.forget(line.key)
            self._lines = [_line(unit, i) for i, unit in enumerate(units)]
            self.past = []

    @property
    def slices(self) -> int:
        """How many there are."""
        return sum(line.slices for line in self._lines)

    @property
    def complete(self) -> int:
        """How many have no point left."""
        return self.slices - sum(len(line.left) for line in self._lines)

    def next(self) -> Unit | None:
        """See ``fuzz.executors.Plan``."""
        seconds = None if self._until is None else self._until - time.monotonic()
        ready = [(n / line.slices, i, n) for i, line in enumerate(self._lines) if (n := line.next) is not None]
        if not ready or self._points == 0 or (seconds is not None and seconds <= 0):
            return None
        _, i, number = min(ready)
        line = self._lines[i]
        most = UNIT_POINTS if self._points is None else min(UNIT_POINTS, self._points)
        line.busy[number] = most
        self._spend(most)
        exclude = tuple(sorted(line.known))
        return replace(line.unit, slice=line.left[number], lane=i, max_cases=most, max_seconds=seconds, exclude=exclude)

    def observe(self, unit: Unit, event: Event) -> None:
        """See ``fuzz.executors.Plan``."""
        assert unit.slice is not None
        line, number = self._lines[unit.lane], unit.slice.number
        if isinstance(event, BatchFinished) and event.progress is not None:
            line.busy[number] -= event.progress.slice.done - line.left[number].done
        # An error without a scenario is one of this run, not of the slice.
        if isinstance(event, (BatchFinished, FindingFound)) or (isinstance(event, HarnessError) and event.scenario):
            self._store.note(line.key, event)
            line.hear(event)
        if isinstance(event, (UnitFinished, WorkerDied)):
            self._spend(-line.busy.pop(number))
            died = isinstance(event, WorkerDied)
            line.deaths += isinstance(event, WorkerDied) and not event.killed
            if died or line.left.get(number) == unit.slice:
                line.aside.add(number)

    def given_up(self) -> Iterator[HarnessError]:
        """Workers some of whose slices could not be finished."""
        for line in self._lines:
            number = len(line.left) if line.deaths >= DEATHS else len(line.aside & line.left.keys())
            if number:
                message = f"{number} of {line.slices} slices are unfinished, as a process died or had an error"
                yield HarnessError(worker=line.unit.worker, bug=line.unit.bug, key=message, message=message)

    def _spend(self, points: int) -> None:
        if self._points is not None:
            self._points -= points


def _line(unit: Unit, lane: int) -> _Line:
    assert unit.slice is not None
    of = unit.slice.of
    key = f"{os.environ.get(SOURCE_VARIABLE, '')} {encode(unit).decode()}"
    return _Line(replace(unit, lane=lane), key, of, {n: replace(unit.slice, number=n) for n in range(of)})
