"""Scenarios of seeded defects around forced acceptance, draft vocabularies, and what spec metadata counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from scenarios import Fault, FaultKind, Generation, Phase, Scenario, Step, check
from tests.museum.cases import K, _dummy, _fills, _scenario, _short, mixed


def forced(worker: str, force: float = 1.5) -> Scenario:
    """A graph is captured; a request is replayed, generates beside a prompt, and then beside its request."""
    each = Generation(request=0, agree=K), Generation(request=1, agree=K)
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, K),)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=each[:1]),
        Step(phase=Phase.REPLAY, draft_len=K, generations=each[:1]),
        Step(draft_len=K, contexts=(_fills(worker, 1, _short(worker), K),), generations=each[:1]),
        Step(draft_len=K, generations=each),
        Step(draft_len=K, generations=each[::-1]),
        prompts=(5, _short(worker)),
        force_num_accepted_tokens=force,
    )


def forced_whole(worker: str) -> Scenario:
    """The same with a number that needs no drawing."""
    return forced(worker, 2.0)


def forced_full(worker: str) -> Scenario:
    """The same with more than there are drafts, where a fraction does not count."""
    return forced(worker, K + 0.5)


def forced_fails(worker: str) -> Scenario:
    """The drafter fails when acceptance has been forced."""
    case = forced(worker)
    fault = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.ERROR)
    return check(replace(case, steps=(*case.steps[:-1], replace(case.steps[-1], fault=fault))))


def own_vocabulary(worker: str) -> Scenario:
    """As ``mixed``, with a draft head that has a vocabulary of its own."""
    case = mixed(worker)
    return check(replace(case, config=replace(case.config, draft_vocab_map=True)))


def fewer_drafts(worker: str) -> Scenario:
    """A step of fewer drafts than there could be."""
    return _scenario(
        worker,
        Step(draft_len=K - 1, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K - 1, generations=(Generation(request=0),)),
        prompts=(5,),
    )


def smaller_batch(worker: str) -> Scenario:
    """Two prompts; then the second of the requests is alone."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5), _fills(worker, 1, 5))),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=(5, 5),
    )


def one_after_the_other(worker: str) -> Scenario:
    """A request ends, and another one starts."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),), finish=(0,)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 5),)),
        prompts=(5, 5),
    )


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-56/kept": one_after_the_other,
    "TRT-56/stale": smaller_batch,
    "TRT-77/forced": forced_whole,
    "TRT-100": forced,
    "TRT-100/warm-up": forced,
    "TRT-100/host": forced,
    "TRT-100/seed": forced,
    "TRT-100/contexts": forced,
    "TRT-100/rows": forced,
    "TRT-100/rolled-back": forced_fails,
    "TRT-100/full": forced_full,
    "TRT-101": own_vocabulary,
    "TRT-101/twice": own_vocabulary,
    "TRT-101/fed-back": own_vocabulary,
    "TRT-102": mixed,
    "TRT-102/width": fewer_drafts,
    "TRT-102/again": mixed,
}
"""Museum entry and variant -> scenario."""
