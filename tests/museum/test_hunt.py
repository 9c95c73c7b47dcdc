"""A quality test: strategies and invariants find what they were not written for, here three defects of the museum.

`specfuzz museum` hunts all of them, and makes what it finds small.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engines.base import SEAMS, run
from invariants import verify
from museum import BUGS, seeded
from scenarios import Scenario
from strategies import faulted_scenarios, scenarios

pytest.importorskip("torch", reason="the portable engine needs torch")

from engines.portable import PortableEngine

ENGINE = PortableEngine()
CASES = 300
CHOSEN = {
    "TRT-01/MTPEagleWorker": "a step has to fail, and another one to follow",
    "TRT-09/Eagle3OneModelWorker": "a graph has to be captured",
    "TRT-17/PARDWorker": "only the drafts get worse",
}


class Found(Exception):
    """A scenario violates something."""


def _sites(scenario: Scenario) -> Mapping[str, int]:
    steps = run(ENGINE, scenario, record=(SEAMS,)).steps
    return steps[-1].sites if len(steps) == len(scenario.steps) else {}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("id", CHOSEN)
def test_a_defect_is_found_within_a_few_hundred_scenarios(id: str) -> None:
    workers = (BUGS[id].worker,)
    clean = scenarios(workers=workers, backends=ENGINE.backends)
    failing = faulted_scenarios(record=_sites, workers=workers, backends=ENGINE.backends)

    @settings(
        max_examples=CASES,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(clean, failing))
    def search(scenario: Scenario) -> None:
        if verify(scenario, partial(run, ENGINE)).violations:
            raise Found

    with seeded(id), pytest.raises(Found):
        search()
