"""Scenarios of seeded defects around verify widths: museum entry and variant -> scenario."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scenarios import Generation, Phase, Scenario, Step
from tests.museum.cases import K, _dummy, _fills, _scenario


def widths(worker: str, **config: Any) -> Scenario:
    """Two requests of which each verifies another number of drafts in each step; graphs of two sums of rows."""

    def rows(first: int, second: int, *, swapped: bool = False) -> tuple[Generation, ...]:
        pair = Generation(request=0, agree=K - 1, verify=first), Generation(request=1, agree=1, verify=second)
        return pair[::-1] if swapped else pair

    dummies = _dummy(worker), _dummy(worker)
    narrow = tuple(Generation(request=None, past=4, verify=v) for v in (1, K - 1))
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=dummies),
        Step(phase=Phase.CAPTURE, draft_len=K, generations=narrow),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, agree=K), _fills(worker, 1, 4, agree=1))),
        Step(draft_len=K, generations=rows(1, K - 1)),
        Step(draft_len=K, generations=rows(K - 1, 1)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=rows(K, 0)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=rows(K, K, swapped=True)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=rows(1, K - 1, swapped=True)),
        Step(draft_len=K, generations=rows(0, K)),
        Step(draft_len=K, generations=rows(K, 2)),
        prompts=(5, 4),
        ragged_verify=True,
        **config,
    )


def widths_in_flight(worker: str) -> Scenario:
    """The same with the overlap scheduler."""
    return widths(worker, overlap=True)


def widths_selected(worker: str) -> Scenario:
    """The same on a sparse backend."""
    return widths(worker, overlap=True, attention_backend="DSA", index_topk=2)


def widths_proposed(worker: str) -> Scenario:
    """The same, verified by proposals."""
    return widths(worker, rejection_sampling=True)


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-20": widths,
    "TRT-20/row-lengths": widths_selected,
    "TRT-37/planned": widths_in_flight,
    "TRT-37/drafting": widths,
    "TRT-75/rows": widths,
    "TRT-75/key": widths,
    "TRT-88/widths": widths,
    "TRT-97/widths": widths_proposed,
}
