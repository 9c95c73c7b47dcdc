"""Every invariant holds where it should and fails where it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import reference
from invariants import Predicate, Verdict, all_invariants, verify
from scenarios import FIELDS, WORKERS, Scenario, Trace
from tests.invariants.backend_mutations import BACKEND_MUTATIONS
from tests.invariants.backend_mutations import SCENARIOS as BACKENDS
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
    overlapped,
    overlapping,
    ranked,
    relaxed,
    replicated,
    separate,
    served,
    sparse,
    started_up,
)
from tests.invariants.combined_mutations import COMBINED_MUTATIONS
from tests.invariants.combined_mutations import SCENARIOS as COMBINED
from tests.invariants.judged_mutations import JUDGED_MUTATIONS
from tests.invariants.manager_mutations import MANAGER_MUTATIONS
from tests.invariants.mutation import Mutation
from tests.invariants.mutations import MUTATIONS
from tests.invariants.overlap_mutations import OVERLAP_MUTATIONS
from tests.invariants.ragged_mutations import RAGGED_MUTATIONS
from tests.invariants.ragged_mutations import SCENARIOS as RAGGED
from tests.invariants.reuse_mutations import REUSE_MUTATIONS, SHARING
from tests.invariants.row_mutations import ROW_MUTATIONS
from tests.invariants.synthetic import dressed, edit, edit_step
from tests.left_out import PartOf

WHOLE = (EAGLE, PARD, DFLASH, EAGLE_TREE)
SPARSE = [sparse(make(worker)) for worker in (EAGLE, PARD) for make in (served, started_up)]
MOVING = {"kv_cache_manager": "V2", "host_offload": True}
SPARSE.append(sparse(served(EAGLE), 12))
ENHANCED = [enhanced(made) for made in (served(MTP), served(PARD), served(EAGLE), started_up(EAGLE), failing(EAGLE))]
FORCED = [forced(EAGLE)]
RANKED = [ranked(worker) for worker in WORKERS] + [replicated(make(PARD)) for make in (served, failing)]
JUDGED = [guided(worker) for worker in (EAGLE, PARD, MTP, SA)] + [relaxed(worker) for worker in (EAGLE, MTP)]
APART = [separate(served(EAGLE), **MOVING), separate(failing(EAGLE)), separate(SPARSE[0]), separate(started_up(PARD))]
CASES = [make(worker) for worker in WORKERS for make in (served, started_up, failing)] + SPARSE
OVERLAPPED = [*map(overlapped, WHOLE), overlapped(MTP), overlapping(failing(EAGLE)), sparse(overlapped(EAGLE), 12)]
OVERLAPPED.append(separate(overlapping(served(PARD))))
HYBRID = [*map(hybrid, [*map(served, (PARD, SA, DFLASH, MTP_TREE)), started_up(EAGLE), failing(EAGLE), OVERLAPPED[0]])]
CASES += [*FORCED, *JUDGED, *APART, *ENHANCED, *RANKED, *BACKENDS, *OVERLAPPED, *HYBRID, *SHARING, *COMBINED, *RAGGED]
FEW = [make(worker) for worker in WHOLE for make in (served, started_up, failing)] + SPARSE
FEW += [served(MTP), served(SA), *FORCED, guided(EAGLE), relaxed(EAGLE), *APART[:3], *ENHANCED[2:]]
FEW += [ranked(MTP_EAGLE), *BACKENDS[::3], BACKENDS[7], OVERLAPPED[0], *OVERLAPPED[-3:-1], *HYBRID[3:]]
FEW += SHARING[:2] + COMBINED[::2] + RAGGED[3:5]
ALL_MUTATIONS = [*MUTATIONS, *MANAGER_MUTATIONS, *JUDGED_MUTATIONS, *BACKEND_MUTATIONS, *OVERLAP_MUTATIONS]
ALL_MUTATIONS += ROW_MUTATIONS + REUSE_MUTATIONS + COMBINED_MUTATIONS + RAGGED_MUTATIONS


@cache
def _oracle(scenario: Scenario) -> Trace:
    return reference.trace(scenario)


def _ask(scenario: Scenario, run: Callable[[Scenario], Trace], **options: Any) -> Verdict:
    """``verify``, with one trace of the oracle for all questions about a scenario."""
    return verify(scenario, run, expected=_oracle(scenario), **options)


@cache
def _clean(scenario: Scenario) -> Verdict:
    return _ask(scenario, dressed)


def _run(mutation: Mutation, scenario: Scenario) -> Trace:
    """A right engine, but for the scenario under test; twins are run rightly."""
    trace = dressed(scenario)
    return mutation.falsify(trace) if scenario == mutation.scenario else trace


@pytest.mark.exhaustive(every=12)
@pytest.mark.parametrize("scenario", CASES, ids=lambda s: s.config.worker)
def test_all_hold_on_a_right_engine(scenario: Scenario) -> None:
    verdict = _clean(scenario)
    assert verdict.violations == ()
    assert all(reached == held for reached, held in verdict.counts.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("slug", [i.slug for i in all_invariants()])
def test_each_is_reached_and_can_fail(slug: str) -> None:
    assert sum(_clean(scenario).counts[slug][0] for scenario in CASES) > 0
    assert any(mutation.slug == slug for mutation in ALL_MUTATIONS)


@pytest.mark.exhaustive(shows=lambda mutation: {mutation.slug})
@pytest.mark.parametrize("mutation", ALL_MUTATIONS, ids=str)
def test_each_notices_what_is_falsified(mutation: Mutation) -> None:
    slug = mutation.slug
    assert _clean(mutation.scenario).counts[slug][0] > 0
    verdict = _ask(mutation.scenario, lambda scenario: _run(mutation, scenario), only=[slug])
    reached, held = verdict.counts[slug]
    assert reached - held == len(verdict.violations) > 0
    places = [(v.step, v.substep, v.run, v.field) for v in verdict.violations]
    assert (mutation.step, mutation.substep, mutation.run, mutation.field) in places
    assert all(v.invariant == slug and v.message for v in verdict.violations)


class _Watched(Mapping[str, Any]):
    """Fields that remember which of them were looked at."""

    def __init__(self, fields: Mapping[str, Any], read: set[str]) -> None:
        self._fields, self._read = fields, read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@pytest.fixture(scope="module")
def watched() -> tuple[list[tuple[Scenario, Trace]], set[str]]:
    """A few right runs, and the names of the fields of theirs that were looked at."""
    read: set[str] = set()

    def watch(trace: Trace) -> Trace:
        steps = [
            replace(step, substeps=tuple(replace(s, fields=_Watched(s.fields, read)) for s in step.substeps))
            for step in trace.steps
        ]
        return replace(trace, steps=tuple(steps))

    return [(scenario, watch(dressed(scenario))) for scenario in FEW], read


@pytest.mark.exhaustive(every=18)
@pytest.mark.parametrize("invariant", [i for i in all_invariants() if isinstance(i, Predicate)], ids=lambda i: i.slug)
def test_each_declares_what_it_reads(
    invariant: Predicate, watched: tuple[list[tuple[Scenario, Trace]], set[str]]
) -> None:
    runs, read = watched
    read.clear()
    for scenario, trace in runs:
        _ask(scenario, lambda _, trace=trace: trace, only=[invariant.slug])
    assert read <= set(invariant.reads)
    assert set(invariant.reads) <= set(FIELDS)


@pytest.mark.exhaustive(every=18, first=1)
@pytest.mark.parametrize("scenario", CASES, ids=lambda s: s.config.worker)
def test_an_unobserved_field_is_not_reached(scenario: Scenario) -> None:
    bare = [
        replace(step, substeps=tuple(replace(s, fields={}) for s in step.substeps)) for step in dressed(scenario).steps
    ]
    trace = Trace("blind", "cpu", tuple(bare))
    verdict = _ask(scenario, lambda _: trace, relations=False)
    steps_only = {"steps-complete", "run-complete", "substeps-in-order", "fault-surfaces", "state-can-be-read"}
    steps_only.add("failure-ends-what-is-in-flight")
    assert {slug for slug, (reached, _) in verdict.counts.items() if reached} <= steps_only
    assert verdict.violations == ()


@pytest.mark.parametrize("worker", [EAGLE, MTP_TREE])
def test_a_step_that_fails_before_it_is_prepared_is_judged_by_its_ledger(worker: str) -> None:
    scenario = failing(worker)
    trace = dressed(scenario)
    for step in (0, 2):
        trace = edit(trace, step, "failed", "kv_lens_cuda", lambda _: [])
        trace = edit_step(trace, step, substeps=trace.steps[step].substeps[-1:])
    verdict = _ask(scenario, lambda s: trace if s == scenario else dressed(s))
    assert verdict.violations == ()
    assert verdict.counts["kv-ledger-balanced"][0] > 0


def test_a_failure_before_anything_is_accepted_leaves_the_lengths_alone() -> None:
    scenario = failing(EAGLE)
    prepared, entered, *_, failed = dressed(scenario).steps[0].substeps
    trace = edit_step(dressed(scenario), 0, substeps=(prepared, entered, failed))
    assert [v.step for v in _ask(scenario, lambda _: trace, relations=False).violations] == [0]
    trace = edit(trace, 0, "failed", "kv_lens_cuda", lambda _: prepared["kv_lens_cuda"])
    assert _ask(scenario, lambda _: trace, relations=False).violations == ()


@pytest.mark.parametrize("worker", [PARD, MTP, SA])
def test_a_failure_before_the_one_move_of_the_lengths_leaves_them_alone(worker: str) -> None:
    scenario = failing(worker)
    prepared = dressed(scenario).steps[0].substeps[0]
    trace = edit(dressed(scenario), 0, "failed", "kv_lens_cuda", lambda _: prepared["kv_lens_cuda"])
    assert _ask(scenario, lambda _: trace, relations=False).violations == ()


@pytest.mark.parametrize("kv", [[9, 10], [9, 5], [9, 3], [11, 5], [11, 7]])
def test_a_failure_in_a_tree_leaves_the_lengths_of_any_layer(kv: list[int]) -> None:
    """Of [9, 10]; one token is accepted, so a generation goes on from 3 in layers of 2, and before its context."""
    scenario = failing(EAGLE_TREE)
    trace = edit(dressed(scenario), 0, "failed", "kv_lens_cuda", lambda _: kv)
    assert _ask(scenario, lambda _: trace, relations=False).violations == ()


@pytest.mark.parametrize("name", ["prepared", "entered", "verified", "saved", "draft[0]", "restored", "updated"])
def test_a_substep_that_an_engine_cannot_observe_is_missed_once(name: str) -> None:
    for scenario in FEW:
        steps = tuple(
            replace(step, substeps=tuple(s for s in step.substeps if s.name != name))
            for step in dressed(scenario).steps
        )
        trace = replace(dressed(scenario), steps=steps)
        verdict = _ask(scenario, lambda _, trace=trace: trace, relations=False)
        assert {v.invariant for v in verdict.violations} <= {"substeps-in-order"}


@pytest.mark.exhaustive(every=24)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_an_engine_cannot_observe_is_no_violation(field: str) -> None:
    shown = [f for f in FEW if any(field in s for step in dressed(f).steps for s in step.substeps)]
    for scenario in shown[::2]:
        steps = tuple(
            replace(step, substeps=tuple(replace(s, fields=_without(s.fields, field)) for s in step.substeps))
            for step in dressed(scenario).steps
        )
        trace = replace(dressed(scenario), steps=steps)
        assert _ask(scenario, lambda _, trace=trace: trace, relations=False).violations == ()


def _without(fields: Mapping[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != field}


_LIST_MAY_BE_SHORT = frozenset({"slot_mapping_fp8", "shared_with_eager", "kv_pool_indices", "draft_kv_pool_indices"})
"""Whatever these leave out another field shows, or nothing is wrong."""


@pytest.mark.exhaustive(every=32)
@pytest.mark.parametrize("scenario", FEW, ids=lambda s: s.config.worker)
def test_a_row_that_is_missing_is_a_violation_and_no_error(scenario: Scenario) -> None:
    """An invariant that pairs rows with what was seen of them neither stops where that ends nor breaks down there."""
    trace, tried = dressed(scenario), set[tuple[str, str]]()
    for step in trace.steps:
        for substep in step.substeps:
            for field, value in substep.fields.items():
                place = substep.name.partition("[")[0], field
                if not isinstance(value, list) or not value or place in tried or not _is_judged(place, scenario):
                    continue
                tried.add(place)
                short = edit(trace, step.index, substep.name, field, lambda values: values[:-1], substep.run)
                assert _ask(scenario, lambda _, short=short: short, relations=False).violations, place


def _is_judged(place: tuple[str, str], scenario: Scenario) -> bool:
    substep, field = place
    if field == "draft_kv_cache_block_offsets" and substep in ("verified", "saved", "draft"):
        return False
    dummies = any(row.request is None for step in scenario.steps for row in step.rows)
    return field not in _LIST_MAY_BE_SHORT and not (field == "ctx_len" and dummies)


def test_the_reference_satisfies_every_invariant_itself(part_of: PartOf) -> None:
    for scenario in part_of(CASES, every=4):
        assert _ask(scenario, reference.trace).violations == ()
