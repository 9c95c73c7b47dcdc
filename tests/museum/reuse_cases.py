"""Scenarios of seeded defects around pages that prompts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scenarios import WORKERS, Config, Context, Fault, FaultKind, Generation, Request, Scenario, Step, check
from tests.museum.cases import TREE, K, _fills

_OWN: Final = {"use_separate_draft_kv_cache": True, "draft_num_blocks": 80, "draft_tokens_per_block": 2}


def _alike(worker: str, *steps: Step, prompts: tuple[tuple[int, int], ...], **config: Any) -> Scenario:
    """Prompts of so many tokens, of which so many are those of the first one."""
    tree = TREE | {"num_blocks": 128} if WORKERS[worker].tree else {}
    requests = [
        Request(id=i, prompt_len=n, prefix_of=0 if k else None, prefix_len=k) for i, (n, k) in enumerate(prompts)
    ]
    wanted = Config(worker=worker, max_draft_len=K, enable_block_reuse=True, **tree | config)
    return check(Scenario(config=wanted, requests=tuple(requests), steps=steps))


def shared(worker: str, **config: Any) -> Scenario:
    """A second and a third prompt begin with two pages of the first one; these part right behind them."""
    first, second, third = (Generation(request=i, agree=2) for i in range(3))
    return _alike(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 10),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 11),), generations=(first,)),
        Step(draft_len=K, contexts=(_fills(worker, 2, 9),), generations=(second, first), finish=(0,)),
        Step(draft_len=K, generations=(third, second), finish=(1,)),
        Step(draft_len=K, generations=(third,)),
        prompts=((10, 0), (11, 11), (9, 8)),
        **config,
    )


def shared_in_both(worker: str) -> Scenario:
    """The same with a cache of the drafter's own."""
    return shared(worker, **_OWN)


def drafters_pages_taken(worker: str) -> Scenario:
    """Between two prompts that begin alike a long one takes the pages of the first in the drafter's small pool."""
    return _alike(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 9),), finish=(0,)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 20),), finish=(1,)),
        Step(draft_len=K, contexts=(_fills(worker, 2, 9),)),
        Step(draft_len=K, generations=(Generation(request=2),)),
        prompts=((9, 0), (20, 0), (9, 9)),
        **_OWN | {"draft_num_blocks": 15},
    )


def ends_apart(worker: str) -> Scenario:
    """Of 9 tokens that two prompts share two pages of 4 are full in one cache, and one of 6 in the other."""
    steps = (Step(draft_len=K, contexts=(_fills(worker, 0, 9),)), Step(draft_len=K, contexts=(_fills(worker, 1, 10),)))
    sizes = {"tokens_per_block": 4, "draft_tokens_per_block": 6}
    return _alike(worker, *steps, prompts=((9, 0), (10, 9)), **_OWN | sizes)


def chunked(worker: str) -> Scenario:
    """A prompt begins like one of which a chunk is computed, and later like all of it."""
    return _alike(
        worker,
        Step(draft_len=K, contexts=(Context(request=0, chunk=5),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 10), _fills(worker, 0, 5))),
        Step(draft_len=K, contexts=(_fills(worker, 2, 10),)),
        prompts=((10, 0), (10, 10), (10, 10)),
    )


def failed_between(worker: str) -> Scenario:
    """A step fails between two prompts that begin alike."""
    fault = Fault(site="target_model.forward", occurrence=1, kind=FaultKind.ERROR)
    return _alike(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 10),)),
        Step(draft_len=K, generations=(Generation(request=0),), fault=fault),
        Step(draft_len=K, contexts=(_fills(worker, 1, 10),)),
        prompts=((10, 0), (10, 10)),
    )


def same_prompt(worker: str) -> Scenario:
    """Two full pages, twice."""
    return _alike(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 8),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 8),)),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=((8, 0), (8, 8)),
    )


def pool_full(worker: str) -> Scenario:
    """The second prompt needs all pages, those that are known among them."""
    return _alike(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 10),), finish=(0,)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 10),)),
        Step(draft_len=K, generations=(Generation(request=1),)),
        prompts=((10, 0), (10, 0)),
        num_blocks=5,
    )


def claims_at_once(worker: str) -> Scenario:
    """Two pages are blank, four known; a prompt needs three, and the next one begins with the oldest of the four."""
    return _alike(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),), finish=(0,)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 13),), finish=(1,)),
        Step(draft_len=K, contexts=(_fills(worker, 2, 5), _fills(worker, 3, 5))),
        prompts=((5, 0), (13, 0), (5, 0), (5, 5)),
        num_blocks=6,
    )


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "SGL-11": shared_in_both,
    "SGL-11/shorter": drafters_pages_taken,
    "SGL-11/next-token": shared,
    "TRT-66": shared_in_both,
    "TRT-140": shared,
    "TRT-140/coarser": ends_apart,
    "TRT-140/early": chunked,
    "TRT-140/emptied": shared,
    "TRT-140/late": claims_at_once,
    "TRT-140/failure": failed_between,
    "TRT-140/starved": pool_full,
    "TRT-140/whole-prompt": same_prompt,
}
"""By museum entry and variant."""
