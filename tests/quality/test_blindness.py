"""What small batches and single drafts hide: a silent defect is found without the limit, and not with it.

Of each kind that is blind to one of the two, one defect. Clean scenarios of one run each are enough: nothing here
raises, so no fault brings it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import reference
from engines.base import run
from fuzz.draws import each_anew, from_the_seed_alone
from invariants import Verdict, all_invariants, verify
from invariants.registry import RELATION
from museum import BUGS, seeded
from scenarios import Scenario, Trace
from strategies import configs, scenarios

pytest.importorskip("torch", reason="the portable engine needs torch")

from engines.portable import PortableEngine

ENGINE = PortableEngine()
OF_ONE_RUN = [i.slug for i in all_invariants() if i.kind != RELATION]
CASES = 40
BATCH_OF_ONE = "max_batch"
ONE_DRAFT = "max_draft_len"
BLIND = {
    "TRT-12/MTPEagleWorker": ("K1", BATCH_OF_ONE),
    "TRT-32/Eagle3OneModelWorker": ("K3", ONE_DRAFT),
    "TRT-131/Eagle3OneModelWorker/neighbour": ("K5", BATCH_OF_ONE),
    "TRT-24/Eagle3OneModelWorker": ("K6", BATCH_OF_ONE),
    "TRT-130/Eagle3OneModelWorker/last-step": ("K8", ONE_DRAFT),
    "VLL-19/MTPEagleWorker": ("K9", ONE_DRAFT),
    "TRT-110/MTPEagleWorker/fed-back": ("K14", ONE_DRAFT),
}
"""Defect -> its kind, and the limit that hides it.

K10 and K12 have such defects too (TRT-100/host, TRT-131/any-distance, with one draft), which need more cases.
"""


@cache
def said(scenario: Scenario) -> Trace:
    return reference.trace(scenario)


@cache
def cases(worker: str, limit: str | None) -> list[Scenario]:
    """The first scenarios that the strategies draw, with a limit of 1 or without one."""
    drawn: list[Scenario] = []
    most: dict[str, Any] = {limit: 1} if limit else {}
    # These would take half of the scenarios from the variants that the defects need.
    variants = [variant for variant in ENGINE.variants if variant not in ("overlap", "ragged_verify")]
    config = configs(workers=(worker,), backends=ENGINE.backends, variants=variants, plain_caches=True, **most)

    @seed(0)
    @settings(
        max_examples=CASES,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios(config=config, max_steps=4))
    def draw(scenario: Scenario) -> None:
        drawn.append(scenario)

    with from_the_seed_alone(), each_anew():
        draw()
    return drawn


def noticed(bug: str, limit: str | None) -> Iterator[Verdict]:
    """Verdicts that find fault with the engine that has the defect."""
    for scenario in cases(BUGS[bug].worker, limit):
        with seeded(bug):
            verdict = verify(scenario, partial(run, ENGINE), only=OF_ONE_RUN, expected=said(scenario))
        if verdict.violations:
            yield verdict


@pytest.mark.exhaustive(every=9)
@pytest.mark.parametrize("bug", BLIND)
def test_a_limit_hides_a_silent_defect(bug: str) -> None:
    kind, limit = BLIND[bug]
    assert BUGS[bug].kind == kind
    found = next(noticed(bug, None), None)
    assert found is not None
    assert {step.outcome for step in found.trace.steps} == {"ok"}
    assert next(noticed(bug, limit), None) is None
