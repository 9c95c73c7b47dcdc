"""Scenarios of seeded defects of attention backends: compressed tokens, views of page tables, one page per sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scenarios import Generation, Phase, Scenario, Step
from tests.museum.cases import SEPARATE, K, _fills, _scenario

COMPRESSED: Final = {
    "attention_backend": "DEEPSEEK_V4",
    "index_topk": 2,
    "window_size": 3,
    "compress_ratios": (1, 2, 4),
}
VIEWED: Final = {"attention_backend": "FLASHINFER"}


def _served(worker: str, **config: Any) -> Scenario:
    """Two prompts, then steps in which drafts are accepted and rejected, in either order of the rows."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 7, 1), _fills(worker, 1, 4, K))),
        Step(draft_len=K, generations=(Generation(request=0, agree=K), Generation(request=1))),
        Step(draft_len=K, generations=(Generation(request=1, agree=1), Generation(request=0, agree=2))),
        Step(draft_len=K, generations=(Generation(request=1, agree=K), Generation(request=0))),
        prompts=(7, 4),
        **config,
    )


def compressed(worker: str) -> Scenario:
    """Compressed tokens are completed by prompts, by accepted drafts and by rejected ones."""
    return _served(worker, **COMPRESSED)


def compressed_apart(worker: str) -> Scenario:
    """The same with a drafter that has a cache of its own."""
    return _served(worker, **COMPRESSED, **SEPARATE)


def compressed_graph(worker: str) -> Scenario:
    """A graph is captured with a dummy that completes no compressed token, and replayed with a request that does."""
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(Generation(request=None),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, K),)),
        *(Step(phase=Phase.REPLAY, draft_len=K, generations=(Generation(request=0, agree=n),)) for n in (1, 0, K)),
        prompts=(5,),
        **COMPRESSED | {"compress_ratios": (1, 8), "tokens_per_block": 8},
    )


def viewed(worker: str) -> Scenario:
    """A drafter, if there is any, reads the target's cache through a view."""
    return _served(worker, **VIEWED)


def viewed_apart(worker: str) -> Scenario:
    """A drafter with a cache of its own, of which it has a view."""
    return _served(worker, **VIEWED, **SEPARATE)


def viewed_mixed(worker: str) -> Scenario:
    """A prompt joins a request that generates."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 7, 1),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 4),), generations=(Generation(request=0),)),
        prompts=(7, 4),
        **VIEWED,
    )


def one_page(worker: str) -> Scenario:
    """Two requests, each in one page, whose rows change places."""
    return _served(worker, attention_backend="VANILLA", tokens_per_block=35, max_seq_len=32)


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-160": compressed,
    "TRT-160/windows": compressed,
    "TRT-160/tables": compressed_apart,
    "TRT-160/last-token": compressed,
    "TRT-160/rejected": compressed,
    "TRT-160/keys": compressed,
    "TRT-160/graph": compressed_graph,
    "TRT-161": viewed,
    "TRT-161/positions": viewed_apart,
    "TRT-161/created-once": viewed,
    "TRT-161/aliased": viewed_apart,
    "TRT-161/all-fed": viewed,
    "TRT-161/pages": viewed_apart,
    "TRT-161/totals": viewed_mixed,
    "TRT-161/plan": viewed_mixed,
    "TRT-162": one_page,
    "TRT-162/lengths": one_page,
    "TRT-162/sorted": one_page,
}
