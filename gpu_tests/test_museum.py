"""Seeded defects that need a device to be believed: of graphs and copies, and of what a CPU does one after the other.

What is verified:

1. Each defect with ``on_device`` set is noticed on CUDA in its smallest scenario, and nothing is noticed there without
   it; but for outputs that are read early, which have mostly arrived by then: ``test_races`` stalls them. Those of kind
   K10 run in processes of their own, as what is frozen in a graph may be an address that is no longer one; the process
   is then lost. On a device they may show elsewhere than in the emulation: a host loop in a captured region, say, ends
   the capture.
2. TRT-01, TRT-04 and TRT-12 are noticed in a life with a graph too: TRT-01 when general warm-up runs out of memory
   before a capture, TRT-04 in the capture, TRT-12 in replays.
3. So are defects of all kinds whose smallest scenario has a step in flight, pages that prompts share, recurrent layers,
   proposals, ranks that share a draft head, or verify widths: some of each, the next day others (``--whole``: all).
4. After each test the device still computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpu_tests.driving import K, config, drive, dummies, generation, life
from gpu_tests.processes import ended
from gpu_tests.sampling import Sampled
from invariants import verify
from museum import BUGS, Bug, seeded
from scenarios import WORKERS, Config, Context, Fault, FaultKind, Phase, Request, Scenario, Step, check
from tests.museum.scenario_of import scenario_of

HERE = [bug for bug in BUGS.values() if bug.on_device]
FROZEN = [bug for bug in HERE if bug.kind == "K10"]
"""A graph that goes on with what was can read and write anywhere."""
STALLED = [bug for bug in HERE if bug.id.startswith("TRT-91/") and bug.id.endswith("/not-yet")]
"""A device that is not held up has brought the outputs by the time that they are read: ``test_races`` has these."""
PARTS = 8
SCOPES: dict[str, Callable[[Config], bool]] = {
    "overlap": lambda config: config.overlap,
    "block-reuse": lambda config: config.enable_block_reuse,
    "recurrent": lambda config: config.recurrent,
    "rejection-sampling": lambda config: config.rejection_sampling,
    "tensor-parallel": lambda config: config.tp_size > 1,
    "verify-widths": lambda config: config.ragged_verify,
}
AROUND_GRAPHS = [bug for bug in HERE if bug.id.startswith(("TRT-01/", "TRT-04/", "TRT-12/"))]


def noticed(bug: Bug, scenario: Scenario) -> set[str]:
    """Invariants named by the defect that notice it; without it none does."""
    right = verify(scenario, drive, only=bug.caught_by)
    assert right.violations == ()
    with seeded(bug.id):
        wrong = verify(scenario, drive, only=bug.caught_by, expected=right.expected)
    return {violation.invariant for violation in wrong.violations}


@pytest.mark.parametrize("bug", [bug for bug in HERE if bug not in FROZEN + STALLED], ids=lambda bug: bug.id)
def test_a_defect_is_noticed_on_the_device(bug: Bug) -> None:
    assert noticed(bug, scenario_of(bug))


def assert_noticed(ids: list[str]) -> None:
    """Each defect is noticed, or costs a process its device; nothing is without it."""
    while ids:
        done = ended("-m", "gpu_tests.hunting", *ids)
        seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert seen, done.stderr[:3000]
        for account in seen:
            assert bool(account["noticed"] or account["lost"]) == account["with_bug"], account
        told = [account["id"] for account in seen if account["with_bug"]]
        if len(told) < len(ids) and not seen[-1]["lost"]:
            # What could not even be said: objects were taken down with a device that was lost to the next one.
            assert done.returncode < 0, done.stderr[:3000]
            assert "CUDA error" in done.stderr
            told.append(ids[len(told)])
        ids = ids[len(told) :]


@pytest.mark.parametrize("first", range(PARTS))
def test_defects_of_graphs_are_noticed_or_cost_the_device(first: int) -> None:
    assert_noticed([bug.id for bug in FROZEN[first::PARTS]])


@pytest.mark.parametrize("scope", SCOPES)
def test_defects_of_its_scope_are_noticed(scope: str, sampled: Sampled) -> None:
    ids = [bug.id for bug in BUGS.values() if bug not in HERE and SCOPES[scope](scenario_of(bug).config)]
    assert_noticed(sampled(ids, 6))


def around_a_graph(bug: Bug) -> Scenario:
    """General warm-up out of memory for TRT-01; a capture, a prompt and replays."""
    worker, sparse = bug.worker, bug.id.startswith("TRT-12/")
    pages = {"tokens_per_block": 1, "num_blocks": 256} if bug.id.startswith("TRT-04/") else {}
    scenario = life(worker, "DSA" if sparse else "TRTLLM", **pages)
    if not bug.id.startswith("TRT-01/"):
        return scenario
    traits = WORKERS[worker]
    last = 1 if traits.parallel or traits.keeps_context else 2
    fault = Fault(site="draft_model.forward", occurrence=last, kind=FaultKind.OOM)
    row = Context(request=None, chunk=5, agree=K if traits.drafts_for_contexts else 0)
    warm_up = Step(draft_len=K, phase=Phase.WARMUP, contexts=(row,), generations=dummies(worker, 8), fault=fault)
    return check(replace(scenario, steps=(warm_up, *scenario.steps)))


@pytest.mark.parametrize("bug", AROUND_GRAPHS, ids=lambda bug: bug.id)
def test_it_is_noticed_around_a_graph(bug: Bug) -> None:
    assert noticed(bug, around_a_graph(bug))


def test_a_replay_by_a_stale_map_accepts_less() -> None:
    """TRT-12 as users saw it: text stays exact, acceptance falls, and here only the replay drafted."""
    agree = generation(0, K)
    once = Step(draft_len=K, phase=Phase.REPLAY, generations=(agree, generation(1, K)))
    steps = (
        Step(draft_len=K, phase=Phase.CAPTURE, generations=dummies("MTPEagleWorker", 10, 20)),
        Step(draft_len=K, contexts=(Context(request=0, chunk=5), Context(request=1, chunk=3))),
        once,
        once,
    )
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate((5, 3)))
    scenario = check(Scenario(config=config("MTPEagleWorker", "DSA"), requests=requests, steps=steps))
    counts = "py_num_accepted_draft_tokens"
    right = drive(scenario).steps[-1].find("updated")
    with seeded("TRT-12/MTPEagleWorker"):
        wrong = drive(scenario).steps[-1].find("updated")
    assert right is not None
    assert wrong is not None
    assert right[counts] == {0: K, 1: K}
    assert sum(wrong[counts].values()) < 2 * K
    for request, text in wrong["emitted"].items():
        assert right["emitted"][request][: len(text)] == text
