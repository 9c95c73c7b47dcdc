"""Prompts that begin alike are drawn where pages can be reused, and often enough that they are."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from scenarios import WORKERS, Config, Request, Scenario, Schedule, check, walk
from scenarios.reuse import Key, reuses_on
from strategies import configs, scenarios
from tests.strategies.test_parts import all_of

REUSE = ("enable_block_reuse", "overlap")


def reused(scenario: Scenario) -> list[int]:
    return [row.reused for _, rows in walk(scenario) for row in rows if row.reused]


def parted(scenario: Scenario) -> bool:
    """Whether a request ends while another one has some of its pages, and a step follows."""
    schedule = Schedule(scenario.config, scenario.requests)
    before: dict[Key, int] = {}
    for step in scenario.steps[:-1]:
        schedule.advance(step)
        owners = dict(schedule.reuse.pools[0].owners)
        if any(0 < owners.get(key, 0) < count for key, count in before.items()):
            return True
        before = owners
    return False


def reusing(*variants: str) -> st.SearchStrategy[Config]:
    """Configurations with block reuse."""
    return configs(variants=(*REUSE, *variants)).filter(lambda config: config.enable_block_reuse)


def who_takes_known_pages(scenario: Scenario) -> set[str]:
    """Of ``prompts`` and ``dummies``, in which steps a page that nobody owned any more has been forgotten."""
    schedule, takers = Schedule(scenario.config, scenario.requests), set()
    for step in scenario.steps:
        before = [dict(pool.cached) for pool in schedule.reuse.pools]
        schedule.advance(step)
        now = [(pool.cached, pool.owners) for pool in schedule.reuse.pools]
        if step.fault is None and any(
            key not in cached and key not in owners for known, (cached, owners) in zip(before, now) for key in known
        ):
            takers.add("dummies" if any(row.request is None for row in step.generations) else "prompts")
    return takers


@pytest.mark.exhaustive
def test_block_reuse_is_drawn_for_whoever_has_it_with_pages_that_end_together() -> None:
    seen = all_of(configs(variants=REUSE, backends=("TRTLLM", "DSA", "DEEPSEEK_V4")), 600)
    able = [c for c in seen if reuses_on(c)]
    assert 0.15 < sum(c.enable_block_reuse for c in able) / len(able) < 0.6
    drawn = [c for c in seen if c.enable_block_reuse]
    # Those whose drafter keeps a context of its own, or is given whole prompts, have none.
    assert set(WORKERS) - {c.worker for c in drawn} == {"MTPWorker", "DFlashWorker", "DSparkWorker"}
    separate = {(c.draft_tokens_per_block, c.tokens_per_block) for c in drawn if c.use_separate_draft_kv_cache}
    assert all(2 * draft % target == 0 or target % draft == 0 for draft, target in separate)
    assert any(draft > target for draft, target in separate)


@pytest.mark.exhaustive
def test_prompts_find_pages_of_earlier_ones() -> None:
    seen = all_of(scenarios(config=reusing(), max_steps=8), 200)
    for scenario in seen:
        check(scenario)
    found = [scenario for scenario in seen if reused(scenario)]
    assert len(found) > len(seen) / 6
    assert any(scenario.config.overlap for scenario in found)
    assert any(scenario.config.use_separate_draft_kv_cache for scenario in found)


@pytest.mark.exhaustive
def test_requests_end_while_others_have_their_pages() -> None:
    config = Config(worker="SAWorker", max_draft_len=2, tokens_per_block=2, enable_block_reuse=True)
    seen = all_of(scenarios(config=config, max_steps=10), 100)
    assert sum(map(parted, seen)) >= 3


@pytest.mark.exhaustive
def test_known_pages_give_way_to_prompts_and_to_dummies() -> None:
    seen = all_of(scenarios(config=reusing("attention_dp_size"), max_steps=10), 250)
    found = [who_takes_known_pages(scenario) for scenario in seen]
    assert sum("prompts" in takers for takers in found) > len(seen) / 8
    assert sum("dummies" in takers for takers in found) >= 3


def test_prompts_are_their_own_where_nothing_is_reused() -> None:
    seen = all_of(scenarios(max_steps=4), 100)
    requests = [request for scenario in seen for request in scenario.requests]
    assert requests == [Request(id=r.id, prompt_len=r.prompt_len) for r in requests]
