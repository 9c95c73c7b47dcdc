"""One stream of events: searches and executors emit it; displays, the store and reports consume it.

Events are frozen and travel as JSON, so that a unit of work may run in another process or on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from fuzz.scope import Slice
from scenarios import Finding, Scenario
from scenarios.codec import from_json, to_json


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in (*a, *(n for n in b if n not in a))}


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What was executed.

    cases, steps     scenarios generated and their steps; runs made only to shrink one are not counted
    seconds          time of the search, shrinking included
    planned, fired   faults in steps that were reached, and how often they were raised
    reached, held    invariant -> how often it had something to say, and was right
    observed         fields of ``scenarios.FIELDS`` that the engine showed
    memory           MiB that the process has had resident at most, 0 for a search in the calling process
    grown            by how many of these it had fewer after its first scenarios
    """

    cases: int = 0
    steps: int = 0
    seconds: float = 0.0
    planned: int = 0
    fired: int = 0
    reached: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    observed: tuple[str, ...] = ()
    memory: int = 0
    grown: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            cases=self.cases + other.cases,
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            planned=self.planned + other.planned,
            fired=self.fired + other.fired,
            reached=_sum(self.reached, other.reached),
            held=_sum(self.held, other.held),
            observed=tuple(sorted({*self.observed, *other.observed})),
            memory=max(self.memory, other.memory),
            grown=max(self.grown, other.grown),
        )


@dataclass(frozen=True, kw_only=True)
class CampaignStarted:
    """``cases`` or ``seconds`` is the budget, in scenarios or in time."""

    command: str
    engine: str
    device: str
    workers: tuple[str, ...]
    seed: int
    cases: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a slice of a small scope is done.

    slice     with ``done`` as it is now
    complete  whether no point of it is left
    points    site -> points with a fault there that were run, "" -> those without a fault
    fired     site -> how often the fault was raised
    refused   points that the engine would not run
    """

    slice: Slice
    complete: bool
    points: Mapping[str, int] = field(default_factory=dict)
    fired: Mapping[str, int] = field(default_factory=dict)
    refused: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchFinished:
    """Some cases of one worker are done; ``progress`` where they are points of a small scope."""

    worker: str
    tally: Tally
    bug: str | None = None
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class FindingFound:
    """A violation, shrunk.

    cases  scenarios of its unit up to the one that showed it
    also   invariants that the shrunk scenario violates besides, those of earlier findings among them: most likely for
           the same reason
    """

    finding: Finding
    cases: int
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HarnessError:
    """The suite itself went wrong, so that its verdict cannot be trusted. Equal keys are one error."""

    worker: str
    key: str
    message: str
    scenario: Scenario | None = None
    bug: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerDied:
    """A process that executed units ended before its unit did. ``cause`` says how.

    ``killed``: it was killed from outside, which says nothing of the scenario that it was running.
    """

    worker: str
    cause: str
    scenario: Scenario | None = None
    bug: str | None = None
    killed: bool = False


@dataclass(frozen=True, kw_only=True)
class UnitRefused:
    """A unit cannot run here at all; ``message`` is the text of a ``UsageError``."""

    message: str


@dataclass(frozen=True, kw_only=True)
class UnitFinished:
    """The last event of a unit."""

    worker: str
    bug: str | None = None


@dataclass(frozen=True, kw_only=True)
class CampaignFinished:
    """The budget is spent; ``seconds`` is the time that it took."""

    seconds: float


Event = (
    CampaignStarted
    | BatchFinished
    | FindingFound
    | HarnessError
    | WorkerDied
    | UnitRefused
    | UnitFinished
    | CampaignFinished
)

Events = Generator[Event, None, None]
"""A stream of events. Closing it ends what it comes from."""

_EVENTS: Final[dict[str, type[Any]]] = {cls.__name__: cls for cls in get_args(Event)}


def encode(event: Event) -> bytes:
    """JSON of an event."""
    return json.dumps({"event": type(event).__name__, **to_json(event)}).encode()


def decode(data: bytes) -> Event:
    """The event in its JSON."""
    value = json.loads(data)
    event: Event = from_json(_EVENTS[value.pop("event")], value)
    return event
