"""Scenarios of seeded defects around the overlap scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from scenarios import WORKERS, Context, Fault, FaultKind, Generation, Phase, Scenario, Step, check
from tests.museum.cases import SEPARATE, K, _dummy, _fills, _scenario
from tests.museum.guided_cases import guided
from tests.museum.rank_cases import idle

_SPARSE: Final = {"attention_backend": "DSA", "index_topk": 2}


def _k(worker: str, wanted: int) -> int:
    """A draft length, or the only one that the worker has."""
    return K if WORKERS[worker].fixed_draft_len else wanted


def overlapped(worker: str, **config: Any) -> Scenario:
    """Two requests in changing order with changing draft lengths; one is left out, comes back, ends and runs on."""
    first, second = Generation(request=0, agree=2), Generation(request=1)
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),) * 2),
        Step(draft_len=_k(worker, 1), contexts=(_fills(worker, 0, 5), _fills(worker, 1, 4))),
        Step(draft_len=K, generations=(second, first)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(first, second)),
        Step(draft_len=_k(worker, 2), contexts=(_fills(worker, 2, 3),), generations=(second,)),
        Step(draft_len=K, generations=(second, first, Generation(request=2)), finish=(1,)),
        Step(draft_len=K, generations=(second, first)),
        Step(draft_len=K),
        Step(draft_len=K, generations=(first,)),
        prompts=(5, 4, 3),
        overlap=True,
        **config,
    )


def overlapped_sparse(worker: str) -> Scenario:
    """The same on a sparse backend."""
    return overlapped(worker, **_SPARSE)


def overlapped_own_cache(worker: str) -> Scenario:
    """The same with a cache of the drafter's own."""
    return overlapped(worker, **_SPARSE, **SEPARATE)


def overlapped_v2(worker: str) -> Scenario:
    """The same with a manager of the second version."""
    return overlapped(worker, kv_cache_manager="V2")


def overlapped_chunks(worker: str) -> Scenario:
    """The draft length grows from the first chunk of a prompt to its last."""
    return _scenario(
        worker,
        Step(draft_len=1, contexts=(Context(request=0, chunk=2),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 3),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(5,),
        overlap=True,
    )


def overlapped_failure(worker: str) -> Scenario:
    """A step fails while another one is in flight; then a request starts."""
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0),), fault=fault),
        Step(draft_len=K, contexts=(_fills(worker, 1, 4),)),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=(5, 4),
        overlap=True,
    )


def overlapped_automata(worker: str) -> Scenario:
    """The same with automata beside the model."""
    return overlapped(worker, sa_threshold=2)


def overlapped_grammar(worker: str) -> Scenario:
    """A request that a grammar guides."""
    case = guided(worker)
    return check(replace(case, config=replace(case.config, overlap=True)))


def overlapped_pages(worker: str) -> Scenario:
    """The first one where page tables are arrays, and a drafter with a cache of its own reads a view of them."""
    return overlapped(worker, attention_backend="FLASHINFER", **SEPARATE)


def overlapped_idle(worker: str) -> Scenario:
    """This rank has a dummy in two steps, one after the other."""
    case = idle(worker)
    steps = (*case.steps, case.steps[-1])
    return check(replace(case, config=replace(case.config, overlap=True), steps=steps))


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-24/in-flight": overlapped,
    "TRT-30": overlapped,
    "TRT-34": overlapped_chunks,
    "TRT-35/again": overlapped,
    "TRT-35/in-flight": overlapped,
    "TRT-36/in-flight": overlapped,
    "TRT-37/in-flight": overlapped,
    "TRT-37/this-step": overlapped,
    "TRT-51": overlapped_idle,
    "TRT-90": overlapped,
    "TRT-91": overlapped_v2,
    "TRT-91/not-yet": overlapped_v2,
    "TRT-150": overlapped,
    "TRT-150/address": overlapped,
    "TRT-150/captured": overlapped,
    "TRT-150/failure": overlapped_failure,
    "TRT-150/kept": overlapped_failure,
    "TRT-150/left-out": overlapped,
    "TRT-150/maps": overlapped_sparse,
    "TRT-150/own-cache": overlapped_own_cache,
    "TRT-155": overlapped_grammar,
    "TRT-155/hole": overlapped_automata,
    "TRT-155/late": overlapped_automata,
    "TRT-155/places": overlapped_pages,
    "TRT-155/view": overlapped_pages,
    "VLL-03": overlapped,
    "VLL-04": overlapped,
    "VLL-05": overlapped,
}
"""By museum entry and variant."""
