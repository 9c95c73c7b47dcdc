"""Which findings probably have one cause: one slip in an engine violates many invariants, in several workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fuzz.events import FindingFound


class Cause(NamedTuple):
    """Findings, by id, whose scenarios all violate ``invariant``; first those that were shrunk for it."""

    invariant: str
    findings: tuple[str, ...]


def probable_causes(found: Sequence[FindingFound]) -> list[Cause]:
    """Groups of two findings or more, largest first; no finding is in two.

    Each group takes as many of the findings that are left as violate one invariant together. Mere overlaps are not
    followed from finding to finding: wrong drafts, say, come of most defects, and would make one group of all.
    """
    left = list(found)
    shown = list(dict.fromkeys(event.finding.invariant for event in found))
    causes = []
    while left:
        # Of equally many the one that was found first: a search comes upon what is nearest to the cause soonest.
        invariant = max(shown, key=lambda slug: sum(_violates(event, slug) for event in left))
        group = [event for event in left if _violates(event, invariant)]
        left = [event for event in left if event not in group]
        if len(group) > 1:
            group.sort(key=lambda event: event.finding.invariant != invariant)
            causes.append(Cause(invariant, tuple(event.finding.id for event in group)))
    return causes


def _violates(event: FindingFound, slug: str) -> bool:
    return slug == event.finding.invariant or slug in event.also


def cause_lines(found: Sequence[FindingFound]) -> Iterator[str]:
    """The groups as a person reads them, a line each."""
    for invariant, ids in probable_causes(found):
        yield f"probably one cause, as each violates {invariant}: {', '.join(ids)}"
