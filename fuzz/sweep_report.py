"""What a sweep amounts to: a campaign's summary with how much is covered, and where faults struck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fuzz.events import BatchFinished, CampaignStarted, Event
from fuzz.report import Summary, counted, table
from fuzz.sweep_plan import Slices

CLEAN = "(no fault)"
"""Stands for a site in points without a fault."""


@dataclass
class SweepSummary(Summary):
    """The events of a sweep, those of earlier runs that it goes on from included.

    ``points`` and ``fired`` are by fault site; points that the engine would not run are ``refused``.
    """

    plan: Slices | None = None
    points: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    earlier: int = 0

    def feed(self, event: Event) -> None:
        """Take note of an event; the first one brings with it what earlier runs have seen."""
        if isinstance(event, CampaignStarted) and self.start is not None:
            return  # a campaign announces itself again, and what is added up would be lost
        super().feed(event)
        if isinstance(event, CampaignStarted) and self.plan is not None:
            for past in self.plan.past:
                self.feed(past)
            self.earlier = self.total.cases
        elif isinstance(event, BatchFinished) and event.progress is not None:
            self.points.update(event.progress.points)
            self.fired.update(event.progress.fired)
            self.refused += event.progress.refused

    @property
    def complete(self) -> bool:
        """Whether every point of the scope has been run."""
        assert self.plan is not None
        return self.plan.complete == self.plan.slices

    @property
    def unreached(self) -> list[str]:
        """Invariants that had nothing to say, where a person named them and the whole scope has been asked."""
        return super().unreached if self.named and self.complete else []

    @property
    def idle(self) -> list[str]:
        """Workers for which nothing was executed, though nothing is left to do."""
        return super().idle if self.complete else []

    @property
    def _by_site(self) -> list[tuple[str, int, int]]:
        """Site, points and how many fired; first the points without a fault."""
        return [(site or CLEAN, n, self.fired[site]) for site, n in sorted(self.points.items())]

    def to_json(self) -> dict[str, Any]:
        """JSON document of the sweep."""
        assert self.plan is not None
        return {
            **super().to_json(),
            "sites": {site: {"points": n, "fired": fired} for site, n, fired in self._by_site},
            "slices": {"complete": self.plan.complete, "all": self.plan.slices},
            "refused": self.refused,
            "earlier": self.earlier,
        }

    def lines(self) -> Iterator[str]:
        """The summary as a person reads it."""
        assert self.plan is not None
        yield from table(("site", "points", "fired"), [*self._by_site])
        yield ""
        yield f"{counted(sum(self.points.values()), 'point')} in {self.plan.complete} of {self.plan.slices} slices"
        if self.earlier:
            yield f"{self.earlier} of them in earlier runs of this sweep; --again starts over"
        if self.refused:
            yield f"{counted(self.refused, 'point')} that the engine does not run"
        yield from super().lines()
