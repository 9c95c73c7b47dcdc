"""Whose row was read as whose, for a person: what `specfuzz explain --provenance` adds to a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import fuzz.engines
from fuzz.explain import Line
from fuzz.subject import Subject
from museum import seeded
from scenarios import UsageError

MOST: Final = 12
"""Rows that are listed; the first ones are closest to the cause."""


def misread_rows(subject: Subject) -> list[str]:
    """Run the scenario once more with a tag on each row: the rows that were read as another request's, in order.

    It runs on the CPU, whatever device the subject is of.

    Raises ``UsageError`` for an engine other than the portable one.
    """
    if subject.engine != fuzz.engines.PORTABLE:
        raise UsageError("--provenance: rows are followed in the portable engine only; leave it out")
    from engines.portable import provenance

    with seeded(subject.active_bug):
        return [str(row) for row in provenance.misread_rows(subject.scenario)]


def provenance_lines(misread: Sequence[str]) -> Iterator[Line]:
    """These rows on a page."""
    yield Line("")
    if not misread:
        yield Line("provenance: no row was seen to be read as another request's")
        return
    yield Line(f"provenance: {len(misread)} rows were read as another request's")
    for number, row in enumerate(misread[:MOST]):
        yield Line(f"  {row}", marked=number == 0)
    if len(misread) > MOST:
        yield Line(f"  ... {len(misread) - MOST} more")
