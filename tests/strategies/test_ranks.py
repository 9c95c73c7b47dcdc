"""Steps of several ranks: all kinds are drawn in a fair share, valid, and shrink to a single rank."""

from __future__ import annotations

from collections import Counter

import pytest

from scenarios import Phase, Scenario, check
from strategies import scenarios
from tests.strategies.test_parts import all_of


def _kinds(case: Scenario) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for step in case.steps:
        if step.peers:
            dummies = sum(row.request is None for row in step.rows)
            kinds["idle"] += dummies == len(step.rows)
            kinds["padded"] += step.phase is Phase.REPLAY and dummies > 0
            kinds["uneven"] += len({(len(p.contexts), p.generations) for p in step.peers}) > 1
    return kinds


@pytest.mark.exhaustive
def test_a_fair_share_has_several_ranks_in_all_kinds_of_steps() -> None:
    seen = all_of(scenarios(variants=["attention_dp_size"], max_steps=6), 250)
    several = [check(case) for case in seen if case.config.attention_dp_size > 1]
    assert 0.2 < len(several) / len(seen) < 0.6
    assert {case.config.attention_dp_rank for case in several} >= {0, 1}
    kinds = sum(map(_kinds, several), Counter())
    assert all(kinds[kind] for kind in ("idle", "padded", "uneven")), kinds


def test_none_is_drawn_unasked() -> None:
    assert all(case.config.attention_dp_size == 1 for case in all_of(scenarios(), 40))
