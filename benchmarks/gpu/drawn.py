"""Scenarios as searches draw them, as a list."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.draws import from_the_seed_alone
from scenarios import BACKENDS, Scenario
from strategies import scenarios


def drawn(seed_of_draws: int, count: int, max_steps: int = 8) -> list[Scenario]:
    """``count`` scenarios of any worker and backend, the same for the same seed."""
    kept: list[Scenario] = []

    @seed(seed_of_draws)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios(backends=BACKENDS, max_steps=max_steps))
    def keep(scenario: Scenario) -> None:
        kept.append(scenario)

    with from_the_seed_alone():
        keep()
    return kept
