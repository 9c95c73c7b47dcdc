"""The span of a step in which sites are counted and the planned fault strikes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from faults.injected import InjectedFault, make
from faults.sites import INJECTORS, family
from scenarios import Fault
from scenarios.errors import UsageError, closest

Visitor = Callable[[str], None]
"""Told of each passage through a site, by name; raises when the planned fault is due."""


class Shelter:
    """Re-entrant context in which sites are neither counted nor made to fail."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc_info: object) -> None:
        self.depth -= 1


class Bracket:
    """Counts passages through sites and raises the planned fault, once.

    counts  site -> passages so far, of the recorded families only
    fired   how often the fault was raised: 0 or 1
    raised  the exception, None as long as it was not raised

    Raises ``UsageError`` for an unknown family in ``record``.
    """

    def __init__(self, fault: Fault | None, record: Collection[str] = (), shelter: Shelter | None = None) -> None:
        for name in record:
            if name not in INJECTORS:
                raise UsageError(f"record: no family of fault sites is called {name!r}; {closest(name, INJECTORS)}")
        self.counts: dict[str, int] = {}
        self.fired = 0
        self.raised: InjectedFault | None = None
        self._fault = fault
        self._site = fault.site if fault else None
        self._passages = 0
        self._record = frozenset(record)
        self._shelter = shelter or Shelter()

    def visitor(self, name: str) -> Visitor | None:
        """What the injector of a family has to call at its sites, None when it is not needed."""
        if name in self._record:
            return self._count
        return self._pass if self._site is not None and family(self._site) == name else None

    def _count(self, site: str) -> None:
        if self._shelter.depth:
            return
        self.counts[site] = self.counts.get(site, 0) + 1
        if site == self._site:
            self._strike()

    def _pass(self, site: str) -> None:
        if site == self._site and not self._shelter.depth:
            self._strike()

    def _strike(self) -> None:
        assert self._fault is not None
        self._passages += 1
        if self._passages == self._fault.occurrence:
            self.fired += 1
            self.raised = make(self._fault)
            raise self.raised
