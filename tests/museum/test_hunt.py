"""A quality test: the search finds what it has not seen, here three defects, others whenever the museum grows."""

from __future__ import annotations

import random

import pytest

from fuzz.events import FindingFound
from fuzz.unit import Unit, run_unit
from museum import BUGS

pytest.importorskip("torch", reason="the portable engine needs torch")

CASES = 300
CHOSEN = random.Random(len(BUGS)).sample(sorted(BUGS), 3)


@pytest.mark.parametrize("id", CHOSEN)
def test_a_defect_is_found_within_a_few_hundred_scenarios(id: str) -> None:
    unit = Unit(engine="portable", device="cpu", worker=BUGS[id].worker, seed=1, max_cases=CASES, bug=id, first=True)
    found = [event for event in run_unit(unit) if isinstance(event, FindingFound)]
    assert [event.finding.bug for event in found] == [id]
    assert found[0].cases <= CASES
