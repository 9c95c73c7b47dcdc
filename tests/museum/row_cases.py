"""Scenarios of seeded defects around recurrent states and proposals: museum entry and variant -> scenario."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scenarios import WORKERS, Context, Generation, Peer, Phase, Scenario, Step, check, kept_in_step
from tests.museum.cases import K, _fills, _scenario

RECURRENT: Final = {"recurrent": True}
REJECTION: Final = {"rejection_sampling": True}


def _k(worker: str, wanted: int) -> int:
    """A draft length, or the only one that the worker has."""
    traits = WORKERS[worker]
    return K if traits.fixed_draft_len else max(wanted, traits.min_draft_len)


def _story(worker: str, *between: Step, **config: Any) -> Scenario:
    """Three requests in changing order, one of them left out for a while; one more gets the slot of one that ended."""
    first, second, third = (Generation(request=i, agree=1 + i) for i in range(3))
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(Generation(request=None, past=4),) * 2),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, agree=1), _fills(worker, 1, 4, agree=2))),
        Step(draft_len=K, contexts=(_fills(worker, 2, 3),), generations=(second, first)),
        Step(draft_len=K, generations=(third, second, first)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(second, third)),
        *between,
        Step(draft_len=K, generations=(first, third, second), finish=(2,)),
        Step(draft_len=K, contexts=(_fills(worker, 3, 4),), generations=(first,)),
        Step(draft_len=K, generations=(Generation(request=3), second)),
        prompts=(5, 4, 3, 4, 6),
        **config,
    )


def recurring(worker: str) -> Scenario:
    """Recurrent states of requests that come and go."""
    return _story(worker, **RECURRENT)


def recurring_without_drafts(worker: str) -> Scenario:
    """A step of them has draft length 0."""
    return _story(worker, Step(draft_len=0, generations=(Generation(request=1),)), **RECURRENT)


def recurring_in_chunks(worker: str) -> Scenario:
    """A prompt in two chunks."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(Context(request=0, chunk=3),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 2),)),
        prompts=(5,),
        **RECURRENT,
    )


def recurring_beside_others(worker: str) -> Scenario:
    """A request waits while this rank runs a dummy for the others."""
    ranks = {"attention_dp_size": 2, "attention_dp_rank": 0}
    peers = (Peer(generations=1),)
    prompt = Step(draft_len=K, contexts=(_fills(worker, 0, 5),), peers=peers)
    scenario = _scenario(worker, prompt, prompts=(5,), **ranks, **RECURRENT)
    idle = kept_in_step(scenario.config, Step(draft_len=K, peers=peers))
    goes_on = Step(draft_len=K, generations=(Generation(request=0),), peers=peers)
    return check(Scenario(config=scenario.config, requests=scenario.requests, steps=(prompt, idle, goes_on)))


def proposing(worker: str) -> Scenario:
    """Proposals for requests that come and go, with draft lengths that shrink and grow."""
    shorter = Step(draft_len=_k(worker, 2), generations=(Generation(request=1, agree=2),))
    longer = Step(draft_len=K, generations=(Generation(request=1),))
    return _story(worker, shorter, longer, **REJECTION)


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-10/contexts": proposing,
    "TRT-10/padding": proposing,
    "TRT-10/scratch": proposing,
    "TRT-10/shorter": proposing,
    "TRT-57": recurring_beside_others,
    "TRT-57/captured": recurring,
    "TRT-57/chunk": recurring_in_chunks,
    "TRT-57/kept": recurring,
    "TRT-57/last-owner": recurring,
    "TRT-57/tail": recurring,
    "TRT-57/written": recurring,
    "TRT-95/contexts": recurring,
    "TRT-95/count": recurring,
    "TRT-95/leaf": recurring,
    "TRT-95/no-drafts": recurring_without_drafts,
    "TRT-95/recurrent": recurring,
    "TRT-95/rows": recurring,
    "TRT-97": proposing,
    "TRT-97/contexts": proposing,
    "VLL-03/recurrent": recurring,
    "VLL-18": proposing,
    "VLL-18/contexts": proposing,
    "VLL-18/depth": proposing,
    "VLL-18/rows": proposing,
}
"""By museum entry and variant."""
