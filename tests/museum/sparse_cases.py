"""Scenarios of seeded defects on a sparse backend: what is selected, and through which tables it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from scenarios import Config, Fault, FaultKind, Generation, Phase, Scenario, Step
from tests.museum.cases import SEPARATE, K, _dummy, _fills, _on, _scenario, mixed, replayed

SPARSE: Final = {"attention_backend": "DSA", "index_topk": 64}


def sparse_batch(worker: str) -> Scenario:
    """Two prompts on a sparse backend; then both generate and all of their drafts are meant to agree."""
    rows = (Generation(request=0, agree=K), Generation(request=1, agree=K))
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, K), _fills(worker, 1, 4, K))),
        Step(draft_len=K, generations=rows),
        Step(draft_len=K, generations=rows),
        prompts=(5, 4),
        **SPARSE,
    )


def long_joins_short(worker: str) -> Scenario:
    """A prompt with more tokens than are selected joins a request with fewer, on a sparse backend."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 4, K),)),
        Step(draft_len=K, contexts=(_fills(worker, 1, 14, K),), generations=(Generation(request=0, agree=K),)),
        prompts=(4, 14),
        attention_backend="DSA",
        index_topk=12,
    )


def sparse_chunks(worker: str) -> Scenario:
    """A prompt in two chunks on a sparse backend."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 4),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 3),)),
        prompts=(7,),
        **SPARSE,
    )


def sparse_growth(worker: str) -> Scenario:
    """Requests on a sparse backend, of which the first is alone at first and then behind the second."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5), _fills(worker, 1, 6))),
        Step(draft_len=K, generations=(Generation(request=0),)),
        Step(draft_len=K, generations=(Generation(request=1), Generation(request=0))),
        prompts=(5, 6),
        **SPARSE,
    )


def sparse_rejections(worker: str) -> Scenario:
    """A request on a sparse backend whose drafts do not agree; then drafts that should."""
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K),)),
        Step(draft_len=K, generations=(Generation(request=0),)),
        prompts=(5,),
        attention_backend="DSA",
        index_topk=8,
    )


def sparse_beyond_the_table(worker: str) -> Scenario:
    """Six prompts on a sparse backend, the first as long as the block table admits."""
    longest = 16 - Config(worker=worker, max_draft_len=K).num_extra_kv_tokens
    prompts = (longest, 1, 1, 1, 1, 1)
    contexts = tuple(_fills(worker, i, n, K) for i, n in enumerate(prompts))
    step = Step(draft_len=K, contexts=contexts)
    return _scenario(worker, step, prompts=prompts, tokens_per_block=1, max_seq_len=16, **SPARSE)


def sparse_graph(worker: str) -> Scenario:
    """A graph is captured and replayed on a sparse backend."""
    return _scenario(
        worker,
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(_dummy(worker),)),
        Step(draft_len=K, contexts=(_fills(worker, 0, 5, K),)),
        Step(phase=Phase.REPLAY, draft_len=K, generations=(Generation(request=0, agree=K),)),
        prompts=(5,),
        **SPARSE,
    )


def swap_fails(worker: str) -> Scenario:
    """On a sparse backend the tables of a drafter's own cache cannot be written when a request generates."""
    fault = Fault(site="attn_metadata.prepare_for_indexer_k_cache", occurrence=2, kind=FaultKind.ERROR)
    return _scenario(
        worker,
        Step(draft_len=K, contexts=(_fills(worker, 0, 5),)),
        Step(draft_len=K, generations=(Generation(request=0, agree=K),), fault=fault),
        prompts=(5,),
        **SEPARATE,
        **SPARSE,
    )


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "TRT-09/sparse": sparse_graph,
    "TRT-12": sparse_batch,
    "TRT-13": sparse_beyond_the_table,
    "TRT-13/unclamped": sparse_beyond_the_table,
    "TRT-16": sparse_rejections,
    "TRT-17/generations": sparse_rejections,
    "TRT-62": _on(mixed, **SEPARATE, **SPARSE, host_offload=True),
    "TRT-63": sparse_batch,
    "TRT-63/skipped": sparse_batch,
    "TRT-63/expanded": sparse_growth,
    "TRT-16/expanded": sparse_rejections,
    "TRT-16/dense": sparse_batch,
    "TRT-16/scales": sparse_batch,
    "TRT-17/windows": sparse_chunks,
    "TRT-99": long_joins_short,
    "TRT-06/chain-masks": sparse_batch,
    "TRT-63/in-place": _on(sparse_batch, **SEPARATE | {"draft_num_blocks": 64, "draft_tokens_per_block": 4}),
    "TRT-63/eager": _on(sparse_batch, **SEPARATE),
    "TRT-63/replay": _on(replayed, **SEPARATE, **SPARSE),
    "TRT-63/pool-view": _on(sparse_batch, **SEPARATE),
    "TRT-64": _on(sparse_batch, **SEPARATE),
    "TRT-65": _on(sparse_batch, **SEPARATE),
    "TRT-65/halfway": swap_fails,
    "VLL-08/slots": _on(sparse_batch, **SEPARATE),
}
