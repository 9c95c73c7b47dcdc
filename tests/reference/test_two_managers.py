"""A drafter with a KV cache of its own: two managers with pages of their own, told the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from reference import trace
from scenarios import Context, Fault, FaultKind, Generation, Phase, Request, Scenario, Step, check
from tests.reference.cases import ALL, EAGLE3, PARD, SEPARATE, at, configuration, scenarios

LEDGER = {"draft_kv_tokens", "draft_free_blocks"}


def separate(scenario: Scenario) -> Scenario:
    """The same scenario with smaller pages, of which there are more, for the drafter alone."""
    pages = {"draft_num_blocks": 512, "draft_tokens_per_block": 3}
    return check(replace(scenario, config=replace(scenario.config, use_separate_draft_kv_cache=True, **pages)))


@given(scenarios(SEPARATE))
def test_only_draft_calls_and_a_second_ledger_tell_of_it(scenario: Scenario) -> None:
    shared, apart = trace(scenario).steps, trace(separate(scenario)).steps
    for before, after in zip(shared, apart, strict=True):
        for mine, other in zip(before.substeps, after.substeps, strict=True):
            changed = {name for name in mine.fields if mine[name] != other[name]}
            assert changed == ({"kv_cache_manager"} if mine.name.startswith("draft[") else set())
            assert other.fields.keys() - mine.fields.keys() == (LEDGER if mine.name == "updated" else set())
            if "kv_cache_manager" in other:
                assert other["kv_cache_manager"] == ("draft" if mine.name.startswith("draft[") else "target")


@given(scenarios(ALL))
def test_neither_the_version_of_the_managers_nor_where_pages_lie_is_seen(scenario: Scenario) -> None:
    config = replace(scenario.config, kv_cache_manager="V2", host_offload=True)
    assert trace(check(replace(scenario, config=config))) == trace(scenario)


@pytest.mark.parametrize("worker", [EAGLE3, PARD])
def test_each_manager_counts_pages_of_its_own_size(worker: str) -> None:
    """Prompts of 5: Eagle3 is granted 2 tokens more and 3 drafts, PARD 2 more and 5 draft slots."""
    config = configuration(
        worker,
        3,
        num_blocks=20,
        use_separate_draft_kv_cache=True,
        draft_num_blocks=9,
        draft_tokens_per_block=5,
    )
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.OOM)
    dummy = Generation(request=None, past=9)
    steps = (
        Step(phase=Phase.WARMUP, draft_len=3, generations=(dummy,)),
        Step(draft_len=3, contexts=(Context(request=0, chunk=5), Context(request=1, chunk=5))),
        Step(draft_len=3, generations=(Generation(request=1),), finish=(0,)),
        Step(draft_len=3, contexts=(Context(request=2, chunk=5),)),
        Step(draft_len=3, generations=(Generation(request=1),), fault=fault),
    )
    scenario = Scenario(config=config, requests=tuple(Request(id=i, prompt_len=5) for i in range(3)), steps=steps)
    seen = [step.substeps[-1] for step in trace(check(scenario)).steps]
    assert [s["draft_kv_tokens"] for s in seen] == [s["kv_tokens"] for s in seen]
    if worker == EAGLE3:
        assert [s["draft_kv_tokens"] for s in seen[1:3]] == [{0: 10, 1: 10}, {0: 10, 1: 11}]
        assert [s["free_blocks"] for s in seen] == [20, 14, 14, 14, 20]
        assert [s["draft_free_blocks"] for s in seen] == [9, 5, 4, 4, 9]
    else:
        assert [s["draft_kv_tokens"] for s in seen[1:3]] == [{0: 12, 1: 12}, {0: 12, 1: 13}]
        assert [s["free_blocks"] for s in seen] == [20, 14, 13, 13, 20]
        assert [s["draft_free_blocks"] for s in seen] == [9, 3, 3, 3, 9]
    failed = at(trace(scenario).steps[-1], "failed")
    assert (failed["kv_cache_manager"], failed["draft_kv_tokens"]) == ("target", {})
