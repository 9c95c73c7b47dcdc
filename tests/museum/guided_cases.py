"""Scenarios of seeded defects around guided decoding and relaxed acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from scenarios import WORKERS, Context, Generation, Phase, Scenario, Step, check
from tests.museum.cases import K, _dummy, _fills, _scenario

_RELAXED: Final = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 2, "relaxed_delta": 0.5}


def _agree(worker: str, drafts: int) -> int:
    """Agreement with so many drafts, where they are guided as the target is."""
    return drafts if WORKERS[worker].guides_drafts else 0


def guided(worker: str) -> Scenario:
    """A graph is captured; a request starts, is replayed twice, and generates."""
    some = Generation(request=0, agree=_agree(worker, 1))
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, _agree(worker, 2)),)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(some,)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(some,)),
        Step(draft_len=K, generations=(some,)),
        prompts=(5,),
        guided_decoding=True,
    )


def guided_own_vocabulary(worker: str) -> Scenario:
    """The same with a draft head that has a vocabulary of its own."""
    case = guided(worker)
    return check(replace(case, config=replace(case.config, draft_vocab_map=True)))


def guided_fewer_drafts(worker: str) -> Scenario:
    """A request that has fewer drafts than there could be."""
    return _scenario(
        worker,
        Step(draft_len=K - 1, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K - 1, generations=(Generation(request=0),)),
        prompts=(5,),
        guided_decoding=True,
    )


def guided_without_drafts(worker: str) -> Scenario:
    """Drafts, none, drafts."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        *(Step(draft_len=k, generations=(Generation(request=0),)) for k in (0, 0, K)),
        prompts=(5,),
        guided_decoding=True,
    )


def guided_chunks(worker: str) -> Scenario:
    """A prompt in two chunks, and a generation."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 2),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 3),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(5,),
        guided_decoding=True,
    )


def guided_one_after_the_other(worker: str) -> Scenario:
    """A request generates and ends, and another one starts."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0),), finish=(0,)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 5),)),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=(5, 5),
        guided_decoding=True,
    )


def _thinking(case: Scenario, *requests: int) -> Scenario:
    """``case`` with relaxed acceptance, and with these requests thinking."""
    config = replace(case.config, **_RELAXED)
    return replace(case, config=config, requests=tuple(replace(r, thinking=r.id in requests) for r in case.requests))


def relaxed(worker: str) -> Scenario:
    """Two requests start, of which the second thinks; both generate the other way round, and the second ends."""
    near = (Generation(request=1, near=2), Generation(request=0, near=1))
    contexts = tuple(Context(request=i, chunk=3, agree=1, near=1) for i in (0, 1))
    steps = (
        Step(draft_len=K, contexts=contexts),
        Step(draft_len=K, generations=near),
        Step(draft_len=K, generations=near, finish=(1,)),
        Step(draft_len=K, generations=(Generation(request=0),)),
    )
    case = _scenario(worker, Step(draft_len=K, contexts=(_fills(worker, 0, 3),)), prompts=(3, 3))
    return check(_thinking(replace(case, steps=steps), 1))


def relaxed_not_close(worker: str) -> Scenario:
    """The same with second choices that are too far below the first."""
    case = relaxed(worker)
    return check(replace(case, config=replace(case.config, relaxed_delta=0.125)))


def relaxed_without_drafts(worker: str) -> Scenario:
    """A request that thinks starts in a step without drafts."""
    case = _scenario(worker, Step(draft_len=0, contexts=(_fills(worker, 0, 3),)), prompts=(3,))
    steps = (Step(draft_len=K, generations=(Generation(request=0, near=2),)),) * 2
    return check(_thinking(replace(case, steps=(*case.steps, *steps)), 0))


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-71": guided_fewer_drafts,
    "TRT-130": guided,
    "TRT-130/drafts": guided,
    "TRT-130/last-step": guided_fewer_drafts,
    "TRT-130/twice": guided,
    "TRT-130/late": guided,
    "TRT-130/no-drafts": guided_without_drafts,
    "TRT-130/d2t": guided_own_vocabulary,
    "TRT-130/chunks": guided_chunks,
    "TRT-130/replay": guided,
    "TRT-130/kept": guided_one_after_the_other,
    "TRT-130/stale": guided_one_after_the_other,
    "TRT-131": relaxed,
    "TRT-131/no-drafts": relaxed_without_drafts,
    "TRT-131/rows": relaxed,
    "TRT-131/all": relaxed,
    "TRT-131/any-distance": relaxed_not_close,
    "TRT-131/corrected": relaxed,
    "TRT-131/neighbour": relaxed,
}
"""Museum entry and variant -> scenario."""
