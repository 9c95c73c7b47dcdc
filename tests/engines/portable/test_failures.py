"""Every call that can fail is made to fail, once: the metadata is as before, and the next steps as if nothing was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engines.base import SEAMS, TORCH
from scenarios import WORKERS as TRAITS
from scenarios import Fault, FaultKind, Phase, Scenario, Step, StepTrace
from tests.engines.portable.scripts import ENGINE, context, dummies, generations, go, scenario
from tests.engines.portable.support import BLOCK, TREES, WORKERS
from tests.left_out import PartOf

LAYOUT = (
    "num_contexts", "num_generations", "num_ctx_tokens", "num_tokens", "_seq_lens", "_seq_lens_cuda",
    "host_request_types", "identity", "all_rank_num_tokens", "_saved_tensors",
)  # fmt: skip
MASKS = ("spec_decoding_packed_mask", "spec_decoding_position_offsets", "spec_decoding_generation_lengths")
ANY_PAGE = ("kv_cache_block_offsets", "block_ids_per_seq", "kv_blocks", "connector_block_ids", "slot_ids", "spec_slots")
ANY_PAGE += ("identity", "kv_block_ids_per_seq", "gen_block_ids_per_seq")


def seen(step: StepTrace) -> list[tuple[str, Mapping[str, Any]]]:
    return [(s.name, {k: v for k, v in s.fields.items() if k not in ANY_PAGE}) for s in step.substeps]


def check_failed(worker: str, failed: StepTrace) -> None:
    """Whatever was prepared is as it was; the lengths of a parallel drafter are not left in between.

    Nor are its contexts longer than before, unless the forward was over.
    """
    prepared, last = failed.find("prepared"), failed.substeps[-1]
    assert last.name == "failed"
    if prepared is None:
        return
    assert {k: last[k] for k in LAYOUT} == {k: prepared[k] for k in LAYOUT}
    kv0, verified = prepared["kv_lens_cuda"], failed.find("verified")
    if worker in TREES:
        assert {k: last[k] for k in MASKS} == {k: prepared[k] for k in MASKS}
    if worker == "MTPEagleDynamicTreeWorker":
        assert last["kv_lens_cuda"] == kv0
    if worker in (*BLOCK, "PARDWorker"):
        ends = [kv0]
        if verified is not None:
            contexts = prepared["num_contexts"]
            gens = zip(kv0[contexts:], verified["num_accepted_tokens"][contexts:])
            ends.append(kv0[:contexts] + [kv + acc for kv, acc in gens])
        assert last["kv_lens_cuda"] in ends
    entered = failed.find("restored") or failed.find("entered")
    if entered is not None and worker in BLOCK:
        assert last["ctx_len"] == entered["ctx_len"]


INHERITED = ("MTPEagleWorker", "DraftTargetOneModelWorker", "DSparkWorker")
"""Workers whose steps run the code of another one in the list, but for a call: a sample of torch's has to do."""
LENGTHS = [2 if worker == WORKERS[0] or TRAITS[worker].fixed_draft_len else 1 for worker in WORKERS]


@pytest.mark.parametrize(("worker", "draft_len"), list(zip(WORKERS, LENGTHS, strict=True)))
def test_wherever_a_call_fails_the_next_step_does_not_notice(worker: str, draft_len: int, part_of: PartOf) -> None:
    """Out of memory in the general warm-up, at each call in turn, on one engine (PR #16382).

    Each failing step is the next step of the one before: as far as it gets, it is a clean one.
    """
    rows: dict[str, Any] = {
        "contexts": (context(worker, None, 3, 1),),
        "generations": dummies(5, accept=1 if worker in TREES else 2),
    }
    step = Step(phase=Phase.WARMUP, draft_len=draft_len, **rows)
    case = scenario(worker, (), step, max_draft_len=2)
    sites = go(case, observe=False, record=(SEAMS, TORCH)).steps[0].sites
    faults = [Fault(site=site, occurrence=n, kind=FaultKind.OOM) for site in sites for n in range(1, sites[site] + 1)]
    assert len(faults) > 50
    if worker in TREES:
        # Their loop of small tensors makes so many calls that a sample of all of them has to do.
        faults = faults[::6]
    elif worker in INHERITED:
        faults = [f for number, f in enumerate(faults) if number % 3 == 0 or not f.site.startswith("torch.")]
    faults = part_of(faults, every=8)
    session = ENGINE.open(case.config)
    clean = seen(session.step(step))
    for number, fault in enumerate(faults):
        failed = session.step(replace(step, fault=fault))
        assert (failed.outcome, failed.fired, failed.injected) == ("tolerated", 1, True), fault
        assert failed.substeps[-1]["free_blocks"] == 64
        check_failed(worker, failed)
        got_to = seen(failed)[:-1]
        assert got_to == clean[: len(got_to)], fault
        if number % 16 == 0:
            assert seen(session.step(step)) == clean, fault
    assert seen(session.step(step)) == clean


def served(worker: str, fault: Fault | None, *, fails: bool = True) -> Scenario:
    """One request is prefilled, a second joins it in the step that fails, two others follow."""
    chunk = 3 if TRAITS[worker].chunked_prefill else 5
    joined = Step(draft_len=2, contexts=(context(worker, 1, chunk),), generations=generations([0], 1), fault=fault)
    return scenario(
        worker,
        (4, 5, 3, 6),
        Step(draft_len=2, contexts=(context(worker, 0, 4, 2),), finish=() if fails else (0,)),
        *([joined] if fails else []),
        Step(draft_len=2, contexts=(context(worker, 2, 3, 2),)),
        Step(draft_len=2, contexts=(context(worker, 3, 6, 1),), generations=generations([2], 2)),
        max_draft_len=2,
        num_blocks=16,
    )


@pytest.mark.parametrize("worker", WORKERS)
def test_wherever_a_served_step_fails_the_next_ones_do_not_notice(worker: str, part_of: PartOf) -> None:
    twin = [seen(step) for step in go(served(worker, None, fails=False)).steps[1:]]
    sites = go(served(worker, None), observe=False, record=(SEAMS,)).steps[1].sites
    assert len(sites) == {"MTPWorker": 12, "SAWorker": 9}.get(worker, 13)
    for site, occurrence in part_of([(s, n) for s in sites for n in range(1, sites[s] + 1)], every=3):
        fault = Fault(site=site, occurrence=occurrence, kind=FaultKind.ERROR)
        _, failed, *later = go(served(worker, fault)).steps
        assert (failed.outcome, failed.fired, failed.injected) == ("tolerated", 1, True), fault
        check_failed(worker, failed)
        assert [seen(step) for step in later] == twin, fault
