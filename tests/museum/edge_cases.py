"""Scenarios of seeded defects at the edges of capacity: full batches, all slots taken, the longest request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scenarios import Config, Generation, Phase, Scenario, Step
from tests.museum.cases import SEPARATE, K, _dummy, _fills, _scenario, generate
from tests.museum.rank_cases import idle
from tests.museum.sparse_cases import sparse_batch


def full_batch(worker: str) -> Scenario:
    """As many requests as a batch may have."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5), _fills(worker, 1, 4))),
        Step(draft_len=K, generations=(Generation(request=0), Generation(request=1))),
        prompts=(5, 4),
        max_num_requests=2,
    )


def more_than_a_batch(worker: str, **config: Any) -> Scenario:
    """Two requests take turns in batches of one."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 4),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=(5, 4),
        max_num_requests=1,
        **config,
    )


def more_than_a_batch_in_both(worker: str) -> Scenario:
    """The same with a cache of the drafter's own and managers of the second version."""
    return more_than_a_batch(worker, kv_cache_manager="V2", **SEPARATE)


def replayed_at_the_limit(worker: str) -> Scenario:
    """A request in a graph that is as long as it may be, and is granted its drafts beyond that."""
    config = Config(worker=worker, max_draft_len=K)
    past = 16 - config.num_extra_kv_tokens - config.tokens_per_gen_step(K)
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, past),)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(Generation(request=0),)),
        prompts=(past,),
        max_seq_len=16,
    )


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "SGL-03": sparse_batch,
    "SGL-04": replayed_at_the_limit,
    "SGL-08": idle,
    "TRT-43": generate,
    "TRT-46": full_batch,
    "TRT-54": more_than_a_batch,
    "TRT-60": more_than_a_batch_in_both,
    "VLL-10": idle,
    "VLL-21": generate,
}
"""By museum entry and variant."""
