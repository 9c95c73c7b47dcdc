"""Twins of one rank among several: without the others, and as the next one of them lives the same steps."""

from __future__ import annotations

from dataclasses import replace

from invariants.twins import Edited, others, padded, real, valid
from scenarios import Config, Context, Generation, Peer, Phase, Request, Scenario, Step, walk
from scenarios import forced_acceptance as forced
from scenarios.pipeline import piped_on


def single_rank(scenario: Scenario) -> Edited | None:
    """The scenario on one rank without others and so without dummies. Pairs: steps that have requests."""
    if scenario.config.attention_dp_size == 1:
        return None
    config = replace(scenario.config, attention_dp_size=1, attention_dp_rank=0)
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    for index, step in enumerate(scenario.steps):
        if not step.phase.is_startup:
            step = replace(step, phase=Phase.EAGER, peers=(), generations=real(step))
            if not step.rows:
                if step.finish:
                    steps[-1] = replace(steps[-1], finish=(*steps[-1].finish, *step.finish))
                continue
            pairs.append((index, len(steps)))
        steps.append(step)
    return valid(replace(scenario, config=config), steps, pairs)


def next_of_replica(scenario: Scenario) -> Edited | None:
    """The scenario on the next rank of tensor parallelism, which runs the same rows. Pairs: all steps."""
    size = scenario.config.tp_size
    if size == 1:
        return None
    config = replace(scenario.config, tp_rank=(scenario.config.tp_rank + 1) % size)
    return valid(replace(scenario, config=config), scenario.steps, ((i, i) for i in range(len(scenario.steps))))


def next_stage(scenario: Scenario) -> Edited | None:
    """The scenario with one rank of a pipeline before this one, which is shown where it can be. Pairs: all steps."""
    # What is told is not used before a request generates.
    told = any(real(step) for step in scenario.steps)
    if not told or scenario.config.pp_size > 1 or not piped_on(scenario.config):
        return None
    twin = replace(scenario, config=replace(scenario.config, pp_size=2))
    return valid(twin, scenario.steps, ((i, i) for i in range(len(scenario.steps))))


def next_rank(scenario: Scenario) -> Edited | None:
    """The scenario as the next rank lives it, with requests like those that this one is told of.

    Before a served step with generations another one begins their requests; all requests end after their step.
    They compute all that they are said to, and reuse no page. Pairs: all steps of the scenario.
    """
    config = scenario.config
    mine, size = config.attention_dp_rank, config.attention_dp_size
    if size == 1:
        return None
    rank = (mine + 1) % size
    # No count depends on pages, so there may be enough for whatever the next rank has.
    twin = replace(scenario, config=replace(_roomy(config), attention_dp_rank=rank))
    requests: list[Request] = []
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    for index, (step, rows) in enumerate(walk(scenario)):
        if not step.phase.is_startup and rows:
            own = Peer(contexts=tuple(row.query for row in rows if row.is_context), generations=len(real(step)))
            ranks = (*step.peers[:mine], own, *step.peers[mine:])
            begun = _begun(config, requests, ranks[rank].generations, step.draft_len)
            contexts = _joined(requests, ranks[rank].contexts)
            if begun:
                idle = (Peer(),) * (size - 1)
                steps.append(Step(draft_len=step.draft_len, contexts=begun, peers=idle))
            generations = tuple(Generation(request=row.request) for row in begun)
            ends = tuple(row.request for row in (*contexts, *begun) if row.request is not None)
            lived = replace(step, contexts=contexts, generations=generations, finish=ends, peers=others(rank, ranks))
            step = padded(twin, lived)
        pairs.append((index, len(steps)))
        steps.append(step)
    return valid(replace(twin, requests=tuple(requests)), steps, pairs)


def _roomy(config: Config) -> Config:
    """A configuration with pools in which every request may be as long as any, and nothing is reused."""
    config = replace(config, enable_block_reuse=False)
    most = config.max_num_requests * config.max_seq_len
    pages = max(config.num_blocks, min(16_384, -(-most // config.tokens_per_block)))
    if not config.use_separate_draft_kv_cache:
        return replace(config, num_blocks=pages)
    draft_pages = max(config.draft_num_blocks, min(16_384, -(-most // config.draft_tokens_per_block)))
    return replace(config, num_blocks=pages, draft_num_blocks=draft_pages)


def _begun(config: Config, requests: list[Request], count: int, draft_len: int) -> tuple[Context, ...]:
    """So many new requests, as short as they may be, with their prompts as rows; their drafts may be forced through."""
    force = config.force_num_accepted_tokens
    agree = forced.most(force, draft_len) - 1 if force else 0
    begun = _joined(requests, (max(1, config.least_history),) * count)
    return tuple(replace(row, agree=agree) for row in begun)


def _joined(requests: list[Request], prompt_lens: tuple[int, ...]) -> tuple[Context, ...]:
    """New requests with these prompts, added to ``requests``, and their prompts as rows."""
    first = len(requests)
    requests += [Request(id=first + i, prompt_len=length) for i, length in enumerate(prompt_lens)]
    return tuple(Context(request=first + i, chunk=length) for i, length in enumerate(prompt_lens))
