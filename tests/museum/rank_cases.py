"""The smallest scenario that shows each seeded defect of attention data parallelism: entry and variant -> scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from museum.bug import MTP_EAGLE
from scenarios import Fault, FaultKind, Generation, Peer, Phase, Scenario, Step, check, kept_in_step
from tests.museum.cases import K, _fills, _scenario, mixed, replayed

RANKS: Final[dict[str, Any]] = {"attention_dp_size": 3, "attention_dp_rank": 1, "num_blocks": 128}
PEERS: Final = (Peer(contexts=(4,), generations=5), Peer())
"""A rank that has more than this one, and an idle one."""


def _served(draft_len: int = K, **rows: Any) -> Step:
    return Step(draft_len=draft_len, **{"peers": PEERS} | rows)


def _in_step(worker: str, *steps: Step, prompts: tuple[int, ...], **config: Any) -> Scenario:
    """The steps on this rank, with the dummies that they call for."""
    alone = _scenario(worker, _served(contexts=(_fills(worker, 0, prompts[0]),)), prompts=prompts, **RANKS | config)
    return check(replace(alone, steps=tuple(kept_in_step(alone.config, step) for step in steps)))


def beside_others(worker: str) -> Scenario:
    """A request among those of other ranks: its prompt, then drafts, which the target agrees with."""
    return _in_step(
        worker,
        _served(contexts=(_fills(worker, 0, 5, agree=K),)),
        _served(generations=(Generation(request=0),)),
        prompts=(5,),
    )


def near_the_limit(worker: str) -> Scenario:
    """The same, where the request is as long as it may be."""
    return _in_step(
        worker,
        _served(contexts=(_fills(worker, 0, 8, agree=K),)),
        _served(generations=(Generation(request=0),)),
        prompts=(8,),
        max_seq_len=8 + K + 1 + K - 1,
    )


def failing(worker: str) -> Scenario:
    """The same, and drafting fails while counts of its own are installed: in a loop, or within a forward."""
    fault = Fault(site="draft_model.logits", occurrence=2, kind=FaultKind.ERROR)
    if worker == MTP_EAGLE:
        # After two rounds each of the target and of the first draft forward, whose counts are the target's.
        fault = replace(fault, site="dist.allgather_rows", occurrence=5)
    return _in_step(worker, _served(contexts=(_fills(worker, 0, 5),), fault=fault), prompts=(5,))


def idle(worker: str) -> Scenario:
    """A step in which this rank has nothing to do."""
    return _in_step(worker, _served(contexts=(_fills(worker, 0, 5),)), _served(), prompts=(5,))


def padded(worker: str) -> Scenario:
    """A request in a graph of three, as another rank has three; there is a graph of one too."""
    captures = [
        Step(phase=Phase.CAPTURE, draft_len=K, generations=(Generation(request=None, past=3),) * n) for n in (3, 1)
    ]
    return _in_step(
        worker,
        *captures,
        _served(contexts=(_fills(worker, 0, 5),)),
        replace(_served(generations=(Generation(request=0),), peers=(Peer(generations=3), Peer())), phase=Phase.REPLAY),
        prompts=(5,),
    )


def shared_head(worker: str) -> Scenario:
    """Two requests on the second of three ranks that share the draft head: the drafts of one may be in its part."""
    rows = (Generation(request=0, agree=K), Generation(request=1))
    prompts = (5, 7)
    contexts = tuple(_fills(worker, i, n, agree=K) for i, n in enumerate(prompts))
    steps = (Step(draft_len=K, contexts=contexts), Step(draft_len=K, generations=rows))
    return _scenario(worker, *steps, prompts=prompts, tp_size=3, tp_rank=1)


SCENARIOS: Final[dict[str, Callable[[str], Scenario]]] = {
    "SGL-12": beside_others,
    "SGL-12/sequences": beside_others,
    "TRT-78": beside_others,
    "TRT-78/width": beside_others,
    "TRT-80": beside_others,
    "TRT-80/shard": shared_head,
    "TRT-80/offset": shared_head,
    "TRT-81": idle,
    "TRT-81/rounds": beside_others,
    "TRT-83": padded,
    "TRT-83/idle": padded,
    "TRT-120": failing,
    "TRT-120/always": beside_others,
    "TRT-120/not-installed": beside_others,
    "TRT-121": padded,
    "TRT-121/first": padded,
    "VLL-06": mixed,
    "VLL-06/drafts": mixed,
    "VLL-06/late": replayed,
    "VLL-19": near_the_limit,
}
