"""Attention data parallelism: what all ranks run in a step, and which rows the executor adds to keep them in step.

Each rank attends to requests of its own, but experts and collectives are shared: every rank runs a forward when one
does, and a graph only if all have the same batch size. One process plays one rank; the others are data.
"""

from __future__ import annotations

from dataclasses import replace

from scenarios import forced_acceptance as forced
from scenarios.errors import ScenarioError, require
from scenarios.model import Config, Generation, Peer, Phase, Step


def padding(config: Config, step: Step) -> tuple[Generation, ...]:
    """The dummies that end the batch of a served step: one on an idle rank, in a graph as many as the largest lacks.

    Empty without other ranks. Each has ``least_history`` cached tokens, and the target accepts none of its drafts but
    those that may be accepted by force.
    """
    if config.attention_dp_size == 1 or step.phase.is_startup:
        return ()
    real = sum(row.request is not None for row in step.rows)
    size = max(real, 1)
    if step.phase is Phase.REPLAY:
        size = max(size, *(peer.generations for peer in step.peers))
    force = config.force_num_accepted_tokens
    accept = forced.most(force, step.draft_len) if force else 1
    return (Generation(request=None, past=config.least_history, accept=accept),) * (size - real)


def kept_in_step(config: Config, step: Step) -> Step:
    """``step`` with a batch for each other rank, and with the dummies that ``padding`` says in place of its own.

    A rank whose batch is missing gets one generation.
    """
    if step.phase.is_startup:
        return replace(step, peers=())
    others = config.attention_dp_size - 1
    real = tuple(row for row in step.generations if row.request is not None)
    peers = (*step.peers, *(Peer(generations=1),) * others)[:others]
    alone = replace(step, generations=real, peers=peers)
    return replace(alone, generations=(*real, *padding(config, alone)))


def batches(config: Config, step: Step) -> tuple[Peer, ...]:
    """The batch of each rank as it runs, in rank order, dummies included; of a valid step.

    Chunks of this rank are those of the step: where blocks are reused, what they compute is less.
    In start-up all ranks run the same. A served rank without requests runs one dummy, and in a graph all ranks are as
    large as the largest. In an iteration that only processes the step in flight none runs anything.
    """
    own = Peer(contexts=tuple(row.chunk for row in step.contexts), generations=len(step.generations))
    if step.phase.is_startup:
        return (own,) * config.attention_dp_size
    if not step.rows:
        return (Peer(),) * config.attention_dp_size
    least = len(step.rows) if step.phase is Phase.REPLAY else 1
    peers = [peer if len(peer.contexts) + peer.generations >= least else Peer(generations=least) for peer in step.peers]
    return (*peers[: config.attention_dp_rank], own, *peers[config.attention_dp_rank :])


def check_ranks_config(config: Config) -> None:
    """Raise ``ScenarioError`` unless the rank is one of the ranks."""
    size, rank = config.attention_dp_size, config.attention_dp_rank
    if rank >= size:
        raise ScenarioError("config.attention_dp_rank", f"{rank} is no rank of {size}", _one_of(size))


def _one_of(size: int) -> str:
    """What to write for a rank of so many."""
    return f"write 0 to {size - 1}" if size > 1 else "write 0, or add ranks"


def check_replica(config: Config) -> None:
    """Raise ``ScenarioError`` unless the rank is one of those of tensor parallelism, and there is a head to cut."""
    size, rank = config.tp_size, config.tp_rank
    require(rank < size, "config.tp_rank", f"{rank} is no rank of {size}", _one_of(size))
    if size == 1:
        return
    require(
        config.traits.shares_draft_head,
        "config.tp_size",
        f"{size} ranks share a draft head, and a draft of {config.worker} is not the best token of one",
        "leave it out",
    )
    for name, default in (("guided_decoding", False), ("attention_dp_size", 1)):
        problem = f"{size} ranks that share a draft head are not combined with {name}"
        require(getattr(config, name) == default, "config.tp_size", problem, "leave one of them out")


def check_ranks(config: Config, step: Step, field: str) -> None:
    """Raise ``ScenarioError`` unless ``peers`` are batches of the other ranks and the dummies those they call for."""
    others, why = config.attention_dp_size - 1, "one for each other rank"
    if step.phase.is_startup:
        others, why = 0, "in start-up all ranks run the same batch"
    elif not step.rows:
        others, why = 0, "no rank runs anything in a step without rows"
    if len(step.peers) != others:
        raise ScenarioError(
            f"{field}.peers", f"has {len(step.peers)} entries, not {others}: {why}", f"write {others} of them"
        )
    for i, peer in enumerate(step.peers):
        _check_peer(config, step, peer, f"{field}.peers[{i}]")
    if not others:
        return
    dummies = padding(config, step)
    real = len(step.generations) - sum(row.request is None for row in step.generations)
    if step.generations[real:] != dummies:
        raise ScenarioError(
            f"{field}.generations",
            f"does not end with the {len(dummies)} dummies that keep the ranks in step",
            "end it with these, as scenarios.padding has them, and no other dummy",
        )
    if not any(row.request is not None for row in step.rows) and not any(
        p.contexts or p.generations for p in step.peers
    ):
        raise ScenarioError(f"{field}.peers", "leave all ranks idle", "give one of them a generation")


def _check_peer(config: Config, step: Step, peer: Peer, field: str) -> None:
    if step.phase is Phase.REPLAY and peer.contexts:
        raise ScenarioError(f"{field}.contexts", "a CUDA graph holds generations only, on all ranks", "remove them")
    for i, chunk in enumerate(peer.contexts):
        if chunk < 1:
            raise ScenarioError(f"{field}.contexts[{i}]", f"{chunk} is too small", "write 1 or more")
    if peer.generations < 0:
        raise ScenarioError(f"{field}.generations", f"{peer.generations} is too small", "write 0 or more")
    rows = len(peer.contexts) + peer.generations
    if rows > config.max_num_requests:
        raise ScenarioError(
            field, f"its {rows} rows exceed max_num_requests {config.max_num_requests}", "remove some of them"
        )
    tokens = sum(peer.contexts) + peer.generations * config.tokens_per_gen_step(step.draft_len)
    if tokens > config.max_num_tokens:
        raise ScenarioError(
            field, f"its {tokens} tokens exceed max_num_tokens {config.max_num_tokens}", "make it smaller"
        )
