"""Scenarios of seeded defects around suffix automata beside a draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from scenarios import Generation, Phase, Scenario, Step
from tests.museum.cases import K, _dummy, _fills, _scenario, _short

_THRESHOLD: Final = 4


def _generates(request: int, match: int = 0, agree: int = 1) -> Generation:
    return Generation(request=request, agree=agree, match=match)


def enhanced(worker: str) -> Scenario:
    """Matches that are too short, just long enough and longer; requests join, change places and end."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, 1), _fills(worker, 1, _short(worker), 1))),
        Step(draft_len=K, contexts=(_fills(worker, 2, 6),), generations=(_generates(1, 4, 2), _generates(0, 3, 2))),
        Step(draft_len=K, generations=(_generates(0, 9), _generates(2, 2), _generates(1, 5, 0)), finish=(1,)),
        Step(draft_len=K, generations=(_generates(2, 4), _generates(0, 0))),
        prompts=(5, _short(worker), 6),
        sa_threshold=_THRESHOLD,
    )


def without_drafts(worker: str) -> Scenario:
    """A request generates with drafts, without, and with drafts again."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=0, generations=(Generation(request=0),)),
        Step(draft_len=K, generations=(_generates(0, 4),)),
        prompts=(5,),
        sa_threshold=_THRESHOLD,
    )


def replayed(worker: str) -> Scenario:
    """A graph of one request is captured and, after a batch of two, replayed."""
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5), _fills(worker, 1, 5))),
        Step(draft_len=K, generations=(_generates(0, 4), _generates(1, 4))),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(_generates(0, 4),)),
        prompts=(5, 5),
        sa_threshold=_THRESHOLD,
    )


def one_ends(worker: str) -> Scenario:
    """A request ends, and another one starts."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),), finish=(0,)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 5),)),
        prompts=(5, 5),
        sa_threshold=_THRESHOLD,
    )


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-110": enhanced,
    "TRT-110/rows": enhanced,
    "TRT-110/threshold": enhanced,
    "TRT-110/any-match": enhanced,
    "TRT-110/fed-back": enhanced,
    "TRT-110/stale": enhanced,
    "TRT-110/grown": replayed,
    "TRT-110/hole": without_drafts,
    "TRT-110/first-token": enhanced,
    "TRT-110/rejected": enhanced,
    "TRT-110/contexts": enhanced,
    "TRT-110/stride": enhanced,
    "TRT-110/by-row": enhanced,
    "TRT-110/kept": one_ends,
}
"""Museum entry and variant -> scenario."""
