"""The enumeration of a small scope is complete, valid and free of duplicates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz.scope import FATAL, VARIANTS, Scope, Slice, cells, points, sliced, slices
from scenarios import BACKENDS, WORKERS, Phase, ScenarioError, check
from scenarios.schedule import check_config

SCOPE = Scope(max_batch=2, max_draft_len=2, steps=2)
SITES = {"draft_model.forward": 2, "target_model.forward": 1}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("worker", WORKERS)
def test_points_are_valid_distinct_and_in_one_slice_each(worker: str) -> None:
    found = list(cells(SCOPE, worker, BACKENDS, VARIANTS))
    everything = [point for cell in found for point in points(cell, SITES)]
    assert len(everything) == sum(1 + 3 * len(cell.kinds) for cell in found)
    assert len({check(point.scenario) for point in everything}) == len(everything)
    of = slices(SCOPE, worker)
    parts = [sliced(Slice(scope=SCOPE, number=n, of=of), found, lambda cell: SITES) for n in range(of)]
    assert sorted(map(str, everything)) == sorted(str(point) for part in parts for point in part)


def _is_valid(worker: str, variant: str) -> bool:
    draft_pool = {"draft_num_blocks": 64} if "draft_tokens_per_block" in VARIANTS[variant] else {}
    try:
        check_config(replace(next(cells(SCOPE, worker, BACKENDS)).config, **VARIANTS[variant], **draft_pool))
    except ScenarioError:
        return False
    return True


@pytest.mark.parametrize("worker", WORKERS)
def test_a_variant_and_what_ends_a_start_have_a_cell(worker: str) -> None:
    found = list(cells(SCOPE, worker, ["TRTLLM"], VARIANTS))
    asked = {cell.variant for cell in found if cell.variant}
    for cell in found:
        assert {name for name in VARIANTS if getattr(cell.config, name) not in (0, 1)} <= {cell.variant}
        assert all(getattr(cell.config, name) == value for name, value in VARIANTS.get(cell.variant, {}).items())
    assert "attention_dp_size" in asked
    assert asked == {name for name in VARIANTS if _is_valid(worker, name)}
    fatal = [cell for cell in found if set(FATAL) <= set(cell.kinds)]
    assert {(cell.phase, cell.contexts, cell.generations, cell.draft_len) for cell in fatal} == {
        (Phase.WARMUP, 1, 1, 2)
    }
    ends = [point.scenario for point in points(fatal[0], SITES) if point.fault and point.fault.kind in FATAL]
    assert {len(scenario.steps) for scenario in ends} == {1}
