"""The invariants asked about a real engine: the portable one, on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from engines.base import run
from invariants import Tally, verify
from invariants.testing import assert_restored
from scenarios import Scenario
from tests.invariants.cases import (
    DFLASH,
    EAGLE,
    EAGLE_TREE,
    MTP,
    MTP_EAGLE,
    MTP_TREE,
    PARD,
    SA,
    enhanced,
    failing,
    forced,
    guided,
    hybrid,
    on_backend,
    overlapped,
    overlapping,
    ragged,
    ranked,
    relaxed,
    replicated,
    separate,
    served,
    sharing,
    sparse,
    started_up,
)
from tests.left_out import PartOf

pytest.importorskip("torch", reason="the portable engine needs torch")

from engines.portable import PortableEngine

WORKERS = (EAGLE, PARD, MTP, SA, DFLASH, EAGLE_TREE, MTP_TREE)
DENSE = [make(worker) for worker in WORKERS for make in (served, started_up, failing)]
JUDGED = [forced(EAGLE), *(guided(worker) for worker in (EAGLE, PARD, MTP)), relaxed(EAGLE), relaxed(MTP)]
RANKED = [ranked(MTP_EAGLE), ranked(EAGLE_TREE), *(replicated(make(EAGLE)) for make in (served, started_up, failing))]
SPARSE = [*(sparse(scenario) for scenario in DENSE[:2]), sparse(DENSE[0], 12)]
APART = [separate(SPARSE[1]), separate(SPARSE[2]), separate(failing(EAGLE)), separate(served(MTP))]
MOVING = separate(served(PARD), kv_cache_manager="V2", host_offload=True)
ENHANCED = [enhanced(scenario) for scenario in (*DENSE[1:3], served(MTP))]
BACKENDS = [separate(on_backend(served(EAGLE), name)) for name in ("DEEPSEEK_V4", "FLASHINFER")]
BACKENDS += [on_backend(started_up(MTP_EAGLE), "FLASHINFER"), on_backend(served(SA), "VANILLA")]
OVERLAPPED = [overlapped(EAGLE), overlapping(failing(EAGLE)), overlapped(EAGLE_TREE)]
OVERLAPPED.append(separate(sparse(overlapped(EAGLE), 12)))
NEWER = [
    sharing(EAGLE),
    ragged(EAGLE),
    sparse(ragged(EAGLE)),
    hybrid(served(SA)),
    hybrid(served(MTP)),
    hybrid(overlapped(EAGLE)),
]
CASES = [*DENSE, *RANKED, *JUDGED, *SPARSE, *APART, MOVING, *ENHANCED, *BACKENDS, *OVERLAPPED, *NEWER]
ENGINE = PortableEngine()


def test_the_portable_engine_violates_nothing_and_reaches_everything(part_of: PartOf) -> None:
    tally = Tally()
    cases = part_of(CASES, every=9)
    for scenario in cases:
        verdict = verify(scenario, partial(run, ENGINE))
        assert verdict.violations == ()
        tally += verdict
    assert len(cases) < len(CASES) or tally.unreached == []


@contextmanager
def _watching_the_worker(session: Any) -> Iterator[list[bool]]:
    """Put ``assert_restored`` around each forward of the worker; yields whether each one succeeded."""
    worker = session._model.spec_worker
    forward, ends = worker.forward, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        ends.append(False)
        with assert_restored(kwargs["attn_metadata"]):
            outputs = forward(*args, **kwargs)
        ends[-1] = True
        return outputs

    worker.forward = watched
    yield ends


@pytest.mark.parametrize(
    ("scenario", "ends"), [(served(EAGLE), [True] * 7), (failing(EAGLE), [False, True] * 2 + [True])]
)
def test_assert_restored_holds_for_its_worker(scenario: Scenario, ends: list[bool]) -> None:
    session = ENGINE.open(scenario.config, scenario.requests)
    with _watching_the_worker(session) as seen:
        outcomes = [session.step(step).outcome for step in scenario.steps]
    session.close()
    assert seen == ends
    assert [outcome == "ok" for outcome in outcomes] == ends
