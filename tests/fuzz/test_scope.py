"""The enumeration of a small scope is complete, valid and free of duplicates."""

from __future__ import annotations

import pytest

from fuzz.scope import Scope, Slice, cells, points, sliced, slices
from scenarios import BACKENDS, WORKERS, check

SCOPE = Scope(max_batch=2, max_draft_len=2, steps=2)
SITES = {"draft_model.forward": 2, "target_model.forward": 1}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("worker", WORKERS)
def test_points_are_valid_distinct_and_in_one_slice_each(worker: str) -> None:
    found = list(cells(SCOPE, worker, BACKENDS))
    everything = [point for cell in found for point in points(cell, SITES)]
    assert len(everything) == 4 * len(found)
    assert len({check(point.scenario) for point in everything}) == len(everything)
    of = slices(SCOPE, worker)
    parts = [sliced(Slice(scope=SCOPE, number=n, of=of), found, lambda cell: SITES) for n in range(of)]
    assert sorted(map(str, everything)) == sorted(str(point) for part in parts for point in part)
