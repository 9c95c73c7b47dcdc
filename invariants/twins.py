"""Twins: scenarios that differ from a given one in a way that must not be seen.

Each function gives the steps of the twin together with the step of the original that each must look like; what
upstream's executor could not produce (a merged chunk may exceed ``max_num_tokens``) is no twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from scenarios import (
    BACKENDS,
    Context,
    Generation,
    Peer,
    Phase,
    Scenario,
    ScenarioError,
    Schedule,
    Step,
    batches,
    check,
    padding,
    walk,
)
from scenarios import forced_acceptance as forced
from scenarios.reuse import Key, KnownPages

Pairs = tuple[tuple[int, int], ...]
Edited = tuple[Scenario, Pairs]


def fault_free(scenario: Scenario) -> bool:
    """Whether nothing is planned to fail."""
    return all(step.fault is None for step in scenario.steps)


def repeatable(scenario: Scenario) -> bool:
    """Whether, besides, no step depends on how many forwards have drawn random numbers before it."""
    return fault_free(scenario) and scenario.config.force_num_accepted_tokens % 1 == 0


def may_have_drawn(scenario: Scenario) -> bool:
    """Whether a step that fails draws a random number, if its fault strikes late enough: for good, as all ranks do."""
    force = scenario.config.force_num_accepted_tokens
    return any(step.fault is not None and forced.draws(force, step.draft_len) for step in scenario.steps)


def valid(scenario: Scenario, steps: Iterable[Step], pairs: Iterable[tuple[int, int]]) -> Edited | None:
    """The scenario with these steps, None if upstream's executor could not produce it or nothing is compared."""
    twin, kept = replace(scenario, steps=tuple(steps)), tuple(pairs)
    try:
        return (check(twin), kept) if kept else None
    except ScenarioError:
        return None


def without(scenario: Scenario, drop: Callable[[Step], bool]) -> Edited | None:
    """The scenario without some of its steps."""
    kept = [i for i, step in enumerate(scenario.steps) if not drop(step)]
    return valid(scenario, (scenario.steps[i] for i in kept), ((i, n) for n, i in enumerate(kept)))


def never_failed(scenario: Scenario) -> Edited | None:
    """The scenario without its failing steps; what they kill ends just before, or never comes.

    A served failure ends every request that has started and every one in its batch. Those that had started were
    active in the step before, which served them, so there they finish; those that the failing batch brought in
    are left in the queue. Requests that had not started go on in both scenarios. Pairs: all steps after the
    first failure. With block reuse a failure makes nothing be known any more: there is no twin where a request finds
    other pages for that.
    """
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    started: set[int] = set()
    ended: set[int] = set()
    failed = False
    for index, step in enumerate(scenario.steps):
        if step.fault is not None:
            failed = True
            if started:
                steps[-1] = replace(steps[-1], finish=(*steps[-1].finish, *sorted(started)))
                started.clear()
            continue
        if failed:
            pairs.append((index, len(steps)))
        steps.append(step)
        started |= {row.request for row in step.rows if row.request is not None} - ended
        ended |= set(step.finish)
        started -= ended
    edited = valid(scenario, steps, pairs)
    return edited if edited and _same_lengths(scenario, *edited) else None


def _same_lengths(scenario: Scenario, twin: Scenario, pairs: Pairs) -> bool:
    """Whether the rows of paired steps have the same lengths."""
    if not scenario.config.enable_block_reuse:
        return True
    given, other = ([rows for _, rows in walk(of)] for of in (scenario, twin))
    return all(given[i] == other[n] for i, n in pairs)


def eager(scenario: Scenario) -> Edited | None:
    """The scenario with each replayed step run by Python instead. Pairs: those steps, but for padded ones.

    The other ranks are given the batches that the graph pads theirs to. With block reuse the pages of dummies that are
    left out stay known, and nothing is paired from there on.
    """
    config = scenario.config
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    for index, step in enumerate(scenario.steps):
        if step.phase is Phase.REPLAY:
            peers = others(config.attention_dp_rank, batches(config, step)) if step.peers else ()
            step = padded(scenario, replace(step, phase=Phase.EAGER, peers=peers))
            if step.rows == scenario.steps[index].rows:
                pairs.append((index, index))
        steps.append(step)
    edited = valid(scenario, steps, pairs)
    if edited is None or not config.enable_block_reuse:
        return edited
    alike = _knowing_alike(scenario, edited[0])
    return valid(scenario, steps, (pair for pair in pairs if pair[0] < alike))


def _knowing_alike(scenario: Scenario, twin: Scenario) -> int:
    """How many steps from the first on leave the same pages known in both, and in the same order to be reclaimed.

    With overlap one less, as a step is over when the next one has been granted its pages.
    """
    pages = zip(_known_pages(scenario), _known_pages(twin))
    alike = next((i for i, (known, other) in enumerate(pages) if known != other), len(scenario.steps))
    return alike - 1 if scenario.config.overlap and alike < len(scenario.steps) else alike


def _known_pages(scenario: Scenario) -> Iterator[list[tuple[KnownPages, list[Key]]]]:
    """What is known in each cache after each step, and the pages of it that nobody has in their order."""
    schedule = Schedule(scenario.config, scenario.requests)
    for step in scenario.steps:
        schedule.advance(step)
        yield [(pool, list(pool.cached)) for pool in schedule.reuse.fork().pools]


def landing(scenario: Scenario) -> Edited | None:
    """The scenario without the overlap scheduler. Pairs: all steps but those that it has no use for.

    Rows that are wasted go, and steps that are left with none; a graph is not replayed for fewer rows than it has.
    """
    if not scenario.config.overlap:
        return None
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    ended: set[int | None] = set()
    for index, step in enumerate(scenario.steps):
        contexts = tuple(row for row in step.contexts if row.request not in ended)
        generations = tuple(row for row in step.generations if row.request not in ended)
        if len(contexts) + len(generations) < len(step.rows):
            step = replace(step, contexts=contexts, generations=generations, phase=Phase.EAGER)
            # Where no rank is left with a request none has a dummy.
            step = padded(scenario, step) if contexts or real(step) or busy(step) else replace(step, generations=())
        ended |= set(step.finish)
        if step.rows:
            pairs.append((index, len(steps)))
            steps.append(step)
        elif step.finish:
            return None
    return valid(replace(scenario, config=replace(scenario.config, overlap=False)), steps, pairs)


def plain(scenario: Scenario, field: str) -> Edited | None:
    """The scenario without what a boolean field of its configuration turns on. Pairs: all steps, if it is turned on."""
    if not getattr(scenario.config, field):
        return None
    off: dict[str, Any] = {field: False}
    config = replace(scenario.config, **off)
    return valid(replace(scenario, config=config), scenario.steps, ((i, i) for i in range(len(scenario.steps))))


def stalled(scenario: Scenario) -> Edited | None:
    """The scenario with copies that run as late as they may, where the host runs ahead of them. Pairs: all steps."""
    if not scenario.config.overlap or scenario.config.stall_copies:
        return None
    twin = replace(scenario, config=replace(scenario.config, stall_copies=True))
    return valid(twin, scenario.steps, ((i, i) for i in range(len(scenario.steps))))


def others(rank: int, ranks: tuple[Peer, ...]) -> tuple[Peer, ...]:
    """All ranks but one."""
    return ranks[:rank] + ranks[rank + 1 :]


def padded(scenario: Scenario, step: Step) -> Step:
    """A served step with the dummies that now keep its rank in step with the others, in place of those it has.

    An iteration that launches nothing has no peers and no dummies.
    """
    if step.phase.is_startup or not (step.rows or step.peers):
        return step
    bare = replace(step, generations=real(step))
    return replace(bare, generations=bare.generations + padding(scenario.config, bare))


def busy(step: Step) -> bool:
    """Whether another rank has a request in it."""
    return any(peer.contexts or peer.generations for peer in step.peers)


def real(step: Step) -> tuple[Generation, ...]:
    """Its generations without dummies."""
    return tuple(row for row in step.generations if row.request is not None)


def one_manager(scenario: Scenario) -> Edited | None:
    """The scenario with target and drafter in one pool, managed as by default. Pairs: all steps, unless it is so.

    A backend whose drafter reads a view of its own cache has another loop without one, so the twin runs on the default.
    """
    given = scenario.config
    view = given.use_separate_draft_kv_cache and BACKENDS[given.attention_backend].draft_view
    config = replace(
        given,
        attention_backend="TRTLLM" if view else given.attention_backend,
        use_separate_draft_kv_cache=False,
        draft_num_blocks=0,
        draft_tokens_per_block=0,
        kv_cache_manager="V1",
        host_offload=False,
    )
    if config == scenario.config:
        return None
    return valid(replace(scenario, config=config), scenario.steps, ((i, i) for i in range(len(scenario.steps))))


def computing_all(scenario: Scenario) -> Edited | None:
    """The scenario without block reuse: each first chunk is computed whole. Pairs: all steps."""
    if not scenario.config.enable_block_reuse:
        return None
    config = replace(scenario.config, enable_block_reuse=False)
    return valid(replace(scenario, config=config), scenario.steps, ((i, i) for i in range(len(scenario.steps))))


def served_alone(scenario: Scenario) -> Edited | None:
    """The scenario with each served batch cut into batches of one row, one after the other; no start-up.

    Pairs: each batch of several rows and the last of its parts. Dummies go, but for that of an idle rank.
    """
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    for index, step in enumerate(scenario.steps):
        if step.phase.is_startup:
            continue
        bare = replace(step, phase=Phase.EAGER, contexts=(), generations=(), finish=())
        steps += [replace(bare, contexts=(row,)) for row in step.contexts]
        steps += [replace(bare, generations=(row,)) for row in real(step)]
        if not step.contexts and not real(step):
            steps.append(padded(scenario, bare))
        steps[-1] = replace(steps[-1], finish=step.finish)
        if len(step.rows) > 1:
            pairs.append((index, len(steps) - 1))
    return valid(scenario, steps, pairs)


def reversed_rows(scenario: Scenario) -> Edited | None:
    """The scenario with contexts and generations of each served batch in reverse order. Pairs: batches it changes."""
    steps = [
        step if step.phase.is_startup
        else padded(scenario, replace(step, contexts=step.contexts[::-1], generations=real(step)[::-1]))
        for step in scenario.steps
    ]  # fmt: skip
    return valid(scenario, steps, ((i, i) for i, step in enumerate(steps) if step != scenario.steps[i]))


def one_shot(scenario: Scenario) -> Edited | None:
    """The scenario with each chunked prompt computed at once, in the step of its last chunk.

    A prompt that is never finished stays as it is. A step left without rows is dropped; what it finishes
    finishes in the step before. Pairs: every step from the first one with a merged prompt on.
    """
    whole = _merged_prompts(scenario)
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    for index, step in enumerate(scenario.steps):
        contexts = tuple(
            whole.get((index, row.request), row)
            for row in step.contexts
            if row.request is None or (index, row.request) in whole or (None, row.request) not in whole
        )
        changed = any((index, row.request) in whole for row in contexts)
        step = replace(step, contexts=contexts)
        if not step.rows:
            if step.finish:
                steps[-1] = replace(steps[-1], finish=(*steps[-1].finish, *step.finish))
            continue
        if changed or pairs:
            pairs.append((index, len(steps)))
        steps.append(step)
    return valid(scenario, steps, pairs)


def _merged_prompts(scenario: Scenario) -> dict[tuple[int | None, int | None], Context]:
    """(step, request) of each last chunk of a chunked prompt -> the whole prompt as one row.

    A request that is merged is listed under (None, request) too. One that ends before its last chunk is not.
    """
    ended: set[int | None] = set()
    lens = {request.id: request.prompt_len for request in scenario.requests}
    done: dict[int, int] = dict.fromkeys(lens, 0)
    merged: dict[tuple[int | None, int | None], Context] = {}
    for index, step in enumerate(scenario.steps):
        for row in step.contexts:
            if row.request is None or row.request in ended:
                continue
            done[row.request] += row.chunk
            if done[row.request] == lens[row.request] > row.chunk:
                merged[index, row.request] = merged[None, row.request] = replace(row, chunk=lens[row.request])
        ended |= {*step.finish}
    return merged
