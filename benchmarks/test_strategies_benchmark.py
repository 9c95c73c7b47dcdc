"""How many values Hypothesis draws from the strategies in a second, its own work included.

A layout of 16 active requests is also drawn as strategies are usually written, as a yardstick for the machine. On a
busy machine, ``--benchmark-timer=time.process_time`` counts only the time that was had.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from scenarios import Config, Context, Generation, Request, Schedule, Step
from strategies import faulted_scenarios, layouts, scenarios

EXAMPLES = 500
ROUNDS = 5
K = 4


def sixteen_generating() -> Schedule:
    """A schedule behind the prefill of 16 requests, all of which generate from then on."""
    config = Config(worker="Eagle3OneModelWorker", max_draft_len=K, max_num_requests=16, num_blocks=256)
    schedule = Schedule(config, tuple(Request(id=i, prompt_len=5) for i in range(16)))
    schedule.advance(Step(draft_len=K, contexts=tuple(Context(request=i, chunk=5) for i in range(16))))
    return schedule


def plain_layouts() -> st.SearchStrategy[list[Generation]]:
    """A layout of as many generations, out of Hypothesis's own strategies."""
    agree = st.lists(st.integers(0, K), min_size=16, max_size=16)
    return st.builds(
        lambda order, agree: [Generation(request=r, agree=a) for r, a in zip(order, agree, strict=True)],
        st.permutations(range(16)),
        agree,
    )


@pytest.mark.parametrize(
    "strategy",
    [
        layouts(sixteen_generating(), draft_len=K),
        plain_layouts(),
        scenarios(),
        faulted_scenarios(record=lambda _: {"target_model.forward": 1, "torch.add": 300}),
    ],
    ids=["layouts", "plain layouts", "scenarios", "faulted scenarios"],
)
def test_rate(benchmark: Any, strategy: st.SearchStrategy[Any]) -> None:
    """Draw 500 values; ``per_second`` in the extra information is the rate of the fastest round."""
    drawn = 0

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(value: object) -> None:
        nonlocal drawn
        drawn += 1

    benchmark.pedantic(draw, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["per_second"] = round(EXAMPLES / benchmark.stats.stats.min)
    assert drawn == EXAMPLES * (ROUNDS + 1)
