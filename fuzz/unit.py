"""A unit of work: a small JSON value that says what to search, so that any executor can run it anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engines.base import SEAMS
from fuzz.scope import Slice
from scenarios.codec import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What to search, and for how long.

    worker        class name of the worker under test
    seed          of the search; equal units find equal things, unless time ends them
    max_cases     scenarios to generate
    max_seconds   when to stop generating, None for no such limit
    faults        families of fault sites to draw from, empty for clean runs only
    invariants    slugs of those to check, empty for all
    exclude       slugs of those to leave out, as their violation is known already
    max_draft_len largest Kmax, None for ``fuzz.search.MAX_DRAFT_LEN``
    bug           defect to seed into the portable engine
    first         whether to stop at the first finding
    lane          which of the campaign's parallel lines of work it continues
    slice         points of a small scope to run one by one instead of drawing scenarios
    plain         whether to draw without aim, for comparison
    """

    engine: str
    device: str
    worker: str
    seed: int
    max_cases: int
    max_seconds: float | None = None
    faults: tuple[str, ...] = (SEAMS,)
    invariants: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_draft_len: int | None = None
    bug: str | None = None
    first: bool = False
    lane: int = 0
    slice: Slice | None = None
    plain: bool = False


def encode(unit: Unit) -> bytes:
    """JSON of a unit."""
    return json.dumps(to_json(unit)).encode()


def decode(data: bytes) -> Unit:
    """The unit in its JSON."""
    return from_json(Unit, json.loads(data))
