"""A campaign: which units are run, in what order and for how long, as one stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from fuzz.events import (
    BatchFinished,
    CampaignFinished,
    CampaignStarted,
    Event,
    Events,
    FindingFound,
    HarnessError,
    UnitFinished,
    UnitRefused,
    WorkerDied,
)
from fuzz.executors import Executor, Plan
from fuzz.unit import Unit
from scenarios import UsageError

FIRST_SECONDS: Final = 0.5
"""What the first unit of a lane gets, however little time is left."""
DEATHS: Final = 3
"""Deaths of its process after which a lane is given up."""
KILLS: Final = 10
"""Kills from outside after which it is: whoever is short of memory will be so again."""
_SEED_OF_ROUND: Final = 10_007


@dataclass
class Lane:
    """A line of work of which one unit runs at a time: one worker (or seeded defect) and its budget.

    unit   what is searched; its ``max_cases`` is the most that one unit of the lane takes
    cases  budget of the lane, None without one
    """

    unit: Unit
    cases: int | None = None
    done: int = 0
    rounds: int = 0
    deaths: int = 0
    kills: int = 0
    seconds: float = 0.0
    begun: int = 0
    """``done`` when its running unit started."""
    running: bool = False
    closed: bool = False

    @property
    def open(self) -> bool:
        """Whether another unit of it can start now."""
        spent = self.cases is not None and self.done >= self.cases
        return not (self.running or self.closed or spent or self.given_up)

    @property
    def given_up(self) -> str:
        """Why it is given up, empty if it is not."""
        if self.deaths >= DEATHS:
            return f"given up after {self.deaths} deaths of its process"
        if self.kills >= KILLS:
            return f"given up, as its process was killed from outside {self.kills} times: is memory short?"
        return ""


class Lanes:
    """The plan of a campaign. The lane that has had the least time is served first, so that all get their share."""

    def __init__(self, units: Sequence[Unit], *, cases: int | None = None, seconds: float | None = None) -> None:
        self._lanes = [Lane(replace(unit, lane=i), cases) for i, unit in enumerate(units)]
        self._known: dict[tuple[str, str | None], set[str]] = {}
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def next(self) -> Unit | None:
        """See ``fuzz.executors.Plan``."""
        lanes = [lane for lane in self._lanes if lane.open]
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left < FIRST_SECONDS:
            # No worker goes without, even where the processes took all the time to start.
            first = [lane for lane in lanes if lane.rounds == 0]
            lanes, left = (first, FIRST_SECONDS) if first or left <= 0 else (lanes, left)
        if not lanes:
            return None
        lane = min(lanes, key=lambda lane: lane.seconds)
        unit = lane.unit
        known = self._known.get((unit.worker, unit.bug), set())
        most = unit.max_cases if lane.cases is None else min(unit.max_cases, lane.cases - lane.done)
        limits = [s for s in (unit.max_seconds, left) if s is not None]
        lane.running = True
        lane.begun = lane.done
        lane.rounds += 1
        return replace(
            unit,
            seed=unit.seed + _SEED_OF_ROUND * (lane.rounds - 1),
            max_cases=most,
            max_seconds=min(limits) if limits else None,
            exclude=tuple(sorted({*unit.exclude, *known})),
        )

    def observe(self, unit: Unit, event: Event) -> None:
        """See ``fuzz.executors.Plan``."""
        lane = self._lanes[unit.lane]
        if isinstance(event, BatchFinished):
            lane.done += event.tally.cases
            lane.seconds += event.tally.seconds
        elif isinstance(event, FindingFound):
            self._exclude(unit, event.finding.invariant, *event.also)
            lane.closed = lane.closed or unit.first
        elif isinstance(event, HarnessError):
            self._exclude(unit, event.key)
        elif isinstance(event, WorkerDied):
            lane.running = False
            if event.killed:
                lane.kills += 1
            else:
                lane.deaths += 1
        elif isinstance(event, UnitFinished):
            lane.running = False
            # A unit takes what it may; where it left something, or did nothing at all, another would do the same.
            lane.closed = lane.closed or lane.cases is not None or lane.done == lane.begun

    def given_up(self) -> Iterator[HarnessError]:
        """Lanes whose budget is not spent, as their process died too often."""
        given_up = {(lane.unit.worker, lane.unit.bug, lane.given_up): None for lane in self._lanes if lane.given_up}
        for worker, bug, message in given_up:
            yield HarnessError(worker=worker, bug=bug, key=message, message=message)

    def _exclude(self, unit: Unit, *keys: str) -> None:
        self._known.setdefault((unit.worker, unit.bug), set()).update(keys)


class CampaignPlan(Plan, Protocol):
    """The plan of a whole campaign."""

    def given_up(self) -> Iterator[HarnessError]:
        """What it could not have done, once there are no more units."""
        ...


def campaign(start: CampaignStarted, plan: CampaignPlan, executor: Executor) -> Events:
    """Run the plan; the same violation by the same worker is passed on once.

    Raises ``UsageError`` if a unit cannot run here. To stop early, close the iterator: there is then no
    ``CampaignFinished``.
    """
    began = time.monotonic()
    seen: set[tuple[str, str | None, str]] = set()
    yield start
    for event in executor.execute(plan):
        if isinstance(event, UnitRefused):
            raise UsageError(event.message)
        if isinstance(event, FindingFound):
            finding = event.finding
            key = finding.scenario.config.worker, finding.bug, finding.invariant
            if key in seen:
                continue
            seen.add(key)
        yield event
    yield from plan.given_up()
    yield CampaignFinished(seconds=time.monotonic() - began)
