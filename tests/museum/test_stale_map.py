"""A quality test about one bug, the stale map of PR #16925: by what it is found, and where nothing can show it.

From the second draft call on, tokens belong to the requests of the target's layout. A batch of one and a single
draft are right by accident, which is how the bug lived for months; text stays exact, only acceptance suffers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from engines.base import run
from invariants import verify
from museum import seeded
from scenarios import Config, Scenario
from strategies import scenarios

pytest.importorskip("torch", reason="the portable engine needs torch")

from engines.portable import PortableEngine

RUN = partial(run, PortableEngine())
WORKERS = ("Eagle3OneModelWorker", "MTPEagleWorker", "DraftTargetOneModelWorker")
MAP, ACCEPTANCE = "req-idx-matches-layout", "acceptance-follows-agreement"
EACH = pytest.mark.parametrize("worker", WORKERS)


class Found(Exception):
    """A scenario violates something."""


def _hunt(worker: str, cases: int, only: tuple[str, ...] | None = None, **limits: int) -> Scenario | None:
    """The first scenario of so many in which the bug is noticed, None if there is none."""
    found: list[Scenario] = []
    config = Config(worker=worker, attention_backend="DSA", index_topk=4, **{"max_draft_len": 3, **limits})

    @seed(0)
    @settings(
        max_examples=cases,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios(config=config, max_steps=6))
    def search(scenario: Scenario) -> None:
        if verify(scenario, RUN, only=only, relations=False).violations:
            found.append(scenario)
            raise Found

    with seeded(f"TRT-12/{worker}"):
        try:
            search()
        except Found:
            return found[-1]
    return None


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("limits", [{"max_num_requests": 1}, {"max_draft_len": 1}], ids=["batch of one", "one draft"])
@EACH
def test_nothing_shows_it_in(worker: str, limits: dict[str, Any]) -> None:
    assert _hunt(worker, 8, **limits) is None


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("only", [MAP, ACCEPTANCE])
@EACH
def test_it_is_found_by_the_map_and_by_acceptance_alone(worker: str, only: str) -> None:
    scenario = _hunt(worker, 200, (only,))
    assert scenario is not None
    assert any(len(step.rows) > 1 and step.draft_len > 1 for step in scenario.steps)
