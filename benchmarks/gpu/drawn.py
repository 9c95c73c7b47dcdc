"""Scenarios as searches draw them, as a list."""

from __future__ import annotations

from itertools import chain

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.draws import each_anew, from_the_seed_alone
from scenarios import BACKENDS, WORKERS, Scenario
from scenarios.acceptance import VARIANTS
from strategies import scenarios


def drawn(seed_of_draws: int, count: int, max_steps: int = 8) -> list[Scenario]:
    """At least ``count`` scenarios, equally many of each worker, of all backends and variants; the same for a seed."""
    share = -(-count // len(WORKERS))
    of_workers = [_drawn(seed_of_draws, worker, share, max_steps) for worker in WORKERS]
    return list(chain.from_iterable(zip(*of_workers, strict=True)))


def _drawn(seed_of_draws: int, worker: str, count: int, max_steps: int) -> list[Scenario]:
    kept: list[Scenario] = []

    @seed(seed_of_draws)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios(workers=[worker], backends=BACKENDS, variants=VARIANTS, max_steps=max_steps))
    def keep(scenario: Scenario) -> None:
        kept.append(scenario)

    with from_the_seed_alone(), each_anew():
        keep()
    # The first is the simplest one there is.
    return [*kept[1:], kept[0]]
