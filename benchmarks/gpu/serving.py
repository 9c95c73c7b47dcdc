"""Scenarios of a served batch, of any size, in graph replays or in eager steps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from scenarios import WORKERS, Config, Context, Generation, Phase, Request, Scenario, Step, check
from scenarios.overlap import overlaps_on
from scenarios.reuse import reuses_on
from scenarios.rows import recurs_on

_SHARED: Final = 12
"""Tokens that prompts have in common where their pages may be reused: some pages of four tokens."""


def serving(
    worker: str,
    *,
    batch: int,
    draft_len: int,
    steps: int,
    phase: Phase = Phase.REPLAY,
    backend: str = "TRTLLM",
    seed: int = 0,
    **dimensions: Any,
) -> Scenario:
    """A graph is captured, ``batch`` prompts are computed, then all requests generate in ``steps`` steps.

    How good the drafts are is drawn for each row. Without replays no graph is captured. ``dimensions`` are further
    fields of the configuration; with block reuse all prompts begin as the first one, which is computed before them.
    """
    random, traits = Random(seed), WORKERS[worker]
    shared, page = (_SHARED, 4) if dimensions.get("enable_block_reuse") else (0, 32)
    prompt = draft_len + shared
    longest = prompt + 4 + steps * (draft_len + 1)
    topk, nodes = (2, 2 * draft_len) if traits.tree else (0, 0)
    width = max(2 * draft_len, nodes + 1, draft_len + 1)
    config = Config(
        worker=worker,
        max_draft_len=draft_len,
        attention_backend=backend,
        index_topk=8 if backend == "DSA" else 0,
        max_num_requests=batch,
        max_num_tokens=batch * max(width, prompt),
        max_seq_len=min(4096, longest + 4 * width),
        tokens_per_block=page,
        num_blocks=batch * (2 + (longest + 4 * width) // page),
        dynamic_tree_max_topK=topk,
        max_total_draft_tokens=nodes,
        seed=seed,
        **dimensions,
    )
    requests = tuple(
        Request(id=i, prompt_len=prompt, prefix_of=0 if i and shared else None, prefix_len=shared if i else 0)
        for i in range(batch)
    )
    dummies = tuple(Generation(request=None, past=draft_len, accept=1) for _ in requests)
    capture = [Step(draft_len=draft_len, phase=Phase.CAPTURE, generations=dummies)] if phase is Phase.REPLAY else []
    most = draft_len if traits.drafts_for_contexts else 0
    contexts = [Context(request=r.id, chunk=r.prompt_len, agree=random.randint(0, most)) for r in requests]
    first = 1 if shared and batch > 1 else batch
    served = [
        Step(
            draft_len=draft_len,
            phase=phase,
            generations=tuple(Generation(request=r.id, agree=random.randint(0, draft_len)) for r in requests),
        )
        for _ in range(steps)
    ]
    prefills = [
        Step(draft_len=draft_len, contexts=tuple(rows)) for rows in (contexts[:first], contexts[first:]) if rows
    ]
    return check(Scenario(config=config, requests=requests, steps=(*capture, *prefills, *served)))


def most_dimensions(worker: str, backend: str) -> dict[str, Any]:
    """Further fields of a configuration, as many as are combined with each other on a worker and a backend."""
    return _dimensions(worker, backend, lambda: True)


def drawn_dimensions(random: Random, worker: str, backend: str) -> dict[str, Any]:
    """Further fields of a configuration, each of which is drawn for every other one that may have it."""
    return _dimensions(worker, backend, lambda: random.random() < 0.5)


def _dimensions(worker: str, backend: str, wanted: Callable[[], bool]) -> dict[str, Any]:
    traits = WORKERS[worker]
    fields: dict[str, Any] = {
        "overlap": wanted() and overlaps_on(backend),
        "recurrent": wanted() and recurs_on(worker, backend),
        "rejection_sampling": wanted() and traits.rejection_sampling,
    }
    config = Config(worker=worker, max_draft_len=1, attention_backend=backend, **fields)
    fields["enable_block_reuse"] = wanted() and reuses_on(config)
    shards = 2 if wanted() and traits.shares_draft_head else 1
    return {**fields, "tp_size": shards, "tp_rank": shards - 1}
