"""The scenario that says which sites a worker has."""

from __future__ import annotations

from scenarios import WORKERS, Config, Context, Generation, Phase, Request, Scenario, Step, check


def small_scenario(worker: str) -> Scenario:
    """One step of each phase, with a context and a generation wherever they may be."""
    topk, nodes = (2, 4) if WORKERS[worker].tree else (0, 0)
    config = Config(worker=worker, max_draft_len=2, dynamic_tree_max_topK=topk, max_total_draft_tokens=nodes)
    agree = 1 if config.traits.drafts_for_contexts else 0
    dummy = Generation(request=None, past=3)
    steps = (
        Step(phase=Phase.CAPTURE, draft_len=2, generations=(dummy,)),
        Step(phase=Phase.WARMUP, draft_len=2, contexts=(Context(request=None, chunk=3),), generations=(dummy,)),
        Step(draft_len=2, contexts=(Context(request=0, chunk=3, agree=agree),)),
        Step(draft_len=2, contexts=(Context(request=1, chunk=2),), generations=(Generation(request=0, agree=2),)),
        Step(phase=Phase.REPLAY, draft_len=2, generations=(Generation(request=0, agree=1),)),
    )
    requests = (Request(id=0, prompt_len=3), Request(id=1, prompt_len=2))
    return check(Scenario(config=config, requests=requests, steps=steps))
