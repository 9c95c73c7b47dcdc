"""Scenarios that the adapter is driven with; also those of the GPU run on upstream's own source."""

from __future__ import annotations

from dataclasses import replace

from scenarios import WORKERS, Config, Context, Fault, FaultKind, Generation, Phase, Request, Scenario, Step

KMAX = 3


def _requests(*prompt_lens: int) -> tuple[Request, ...]:
    return tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompt_lens))


def config(worker: str) -> Config:
    """Kmax drafts, or trees of that depth with a few more nodes than a chain has."""
    if not WORKERS[worker].tree:
        return Config(worker=worker, max_draft_len=KMAX)
    return Config(worker=worker, max_draft_len=KMAX, dynamic_tree_max_topK=2, max_total_draft_tokens=KMAX + 2)


def life(worker: str) -> Scenario:
    """A whole life: general warm-up, a capture, a prompt in one go, a mixed batch, generations, a replay, an end."""
    agree = KMAX if WORKERS[worker].drafts_for_contexts else 0
    first = min(agree, 2)
    # A dummy has no tree, of which nothing is accepted.
    accepted = (1, 1) if WORKERS[worker].tree else (3, 2)
    dummies = tuple(Generation(request=None, past=past, accept=n) for past, n in zip((10, 20), accepted, strict=True))
    dummy = Context(request=None, chunk=5, agree=agree)
    steps = (
        Step(draft_len=KMAX, phase=Phase.WARMUP, contexts=(dummy,), generations=dummies),
        Step(draft_len=KMAX, phase=Phase.CAPTURE, generations=dummies),
        Step(draft_len=KMAX, contexts=(Context(request=0, chunk=5, agree=first), Context(request=1, chunk=3))),
        Step(
            draft_len=KMAX,
            contexts=(Context(request=2, chunk=3, agree=agree),),
            generations=(_row(0, 3), _row(1, 1)),
        ),
        Step(draft_len=KMAX, phase=Phase.REPLAY, generations=(_row(0, 1), _row(2, 3))),
        Step(draft_len=KMAX, generations=(_row(2, 0), _row(1, 3)), finish=(1,)),
        Step(draft_len=KMAX, generations=(_row(0, 2),)),
    )
    return Scenario(config=config(worker), requests=_requests(5, 3, 3), steps=steps)


def chunked(worker: str) -> Scenario:
    """A prompt in two chunks, beside a generation in the second."""
    agree = 2 if WORKERS[worker].drafts_for_contexts else 0
    return Scenario(
        config=config(worker),
        requests=_requests(6, 2),
        steps=(
            Step(draft_len=KMAX, contexts=(Context(request=0, chunk=4, agree=agree), Context(request=1, chunk=2))),
            Step(draft_len=KMAX, contexts=(Context(request=0, chunk=2, agree=agree),), generations=(_row(1, 2),)),
            Step(draft_len=KMAX, generations=(_row(0, 3), _row(1, 0))),
            Step(draft_len=KMAX, generations=(_row(0, 1),)),
        ),
    )


def varying(worker: str) -> Scenario:
    """A draft length that falls and rises, to 0 where the worker can.

    The target agrees with no draft of the first step, so what its draft loop left in the cache is of no use.
    """
    shortest = WORKERS[worker].min_draft_len
    return Scenario(
        config=config(worker),
        requests=_requests(4),
        steps=(
            Step(draft_len=KMAX, contexts=(Context(request=0, chunk=4),)),
            Step(draft_len=shortest, generations=(_row(0, shortest),)),
            Step(draft_len=2, generations=(_row(0, 2),)),
            Step(draft_len=KMAX, generations=(_row(0, 3),)),
        ),
    )


def replayed(worker: str) -> Scenario:
    """Two requests none of whose first drafts are right, and all of those that a replay makes."""
    dummies = tuple(Generation(request=None, past=past) for past in (10, 20))
    return Scenario(
        config=config(worker),
        requests=_requests(5, 3),
        steps=(
            Step(draft_len=KMAX, phase=Phase.CAPTURE, generations=dummies),
            Step(draft_len=KMAX, contexts=(Context(request=0, chunk=5), Context(request=1, chunk=3))),
            Step(draft_len=KMAX, phase=Phase.REPLAY, generations=(_row(0, KMAX), _row(1, KMAX))),
            Step(draft_len=KMAX, generations=(_row(0, 0), _row(1, 0))),
        ),
    )


def lives(worker: str) -> list[Scenario]:
    """Those of the three above that the worker can live."""
    traits = WORKERS[worker]
    shorter = [varying(worker)] if not traits.fixed_draft_len else []
    return [life(worker), *([chunked(worker)] if traits.chunked_prefill else []), *shorter]


def _row(request: int, agree: int) -> Generation:
    return Generation(request=request, agree=agree)


def failing(scenario: Scenario, step: int, site: str, occurrence: int = 1, kind: str = "oom") -> Scenario:
    """The scenario up to ``step``, which fails there, and after it two new requests in a step each."""
    fault = Fault(site=site, occurrence=occurrence, kind=FaultKind(kind))
    served = max(request.id for request in scenario.requests) + 1
    later = tuple(Step(draft_len=KMAX, contexts=(Context(request=served + i, chunk=n),)) for i, n in enumerate((3, 4)))
    return replace(
        scenario,
        requests=(*scenario.requests, Request(id=served, prompt_len=3), Request(id=served + 1, prompt_len=4)),
        steps=(*scenario.steps[:step], replace(scenario.steps[step], fault=fault, finish=()), *later),
    )
