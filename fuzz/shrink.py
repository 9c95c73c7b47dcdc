"""Making a failing scenario small: the failure stays, and all that it does not need goes.

It edits the scenario itself and not the draws that made it. A part that is dropped takes with it what can no longer
happen without it, so nearly every edit is worth a run, and a failure is minimal after a few dozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Final, TypeVar

from scenarios import (
    Config,
    Context,
    Generation,
    Peer,
    Phase,
    Scenario,
    ScenarioError,
    Schedule,
    Step,
    check,
    kept_in_step,
)
from scenarios.schedule import walk
from scenarios.trees import most_nodes

_PLAIN_CONTEXT: Final = {"agree": 0, "near": 0, "chunk": 1}
_PLAIN_GENERATION: Final = {"agree": 0, "near": 0, "past": 0, "accept": 1, "match": 0}
"""What a row that does nothing in particular has in each field."""

Row = TypeVar("Row", Context, Generation)
Edit = Callable[[Scenario], Iterator[Scenario]]
"""Variants of a scenario, each of them with less to read in one place; they need not be valid."""


def shrink(
    scenario: Scenario, fails: Callable[[Scenario], bool], *, runs: int = 500, seconds: float = float("inf")
) -> Scenario:
    """The smallest scenario found that ``fails``, starting from one that does.

    runs, seconds  when to stop looking for a smaller one
    """
    best, tried, until = scenario, {scenario}, time.monotonic() + seconds
    again = True
    while again:
        again = False
        for edit in EDITS:
            done = 0
            while True:
                # After a success the list is made anew, and its beginning has been tried already.
                for place, variant in enumerate(edit(best)):
                    candidate = repair(variant) if place >= done else None
                    if candidate is None or candidate in tried:
                        continue
                    if len(tried) > runs or time.monotonic() >= until:
                        return best
                    tried.add(candidate)
                    if fails(candidate):
                        best, done, again = candidate, place, True
                        break
                else:
                    break
    return best


def repair(scenario: Scenario) -> Scenario | None:
    """The scenario without what cannot happen in it; None if nothing is left of it."""
    try:
        may_think = scenario.config.use_relaxed_acceptance_for_thinking
        requests = tuple(
            replace(r, thinking=r.thinking and may_think, prefix_len=min(r.prefix_len, r.prompt_len))
            for r in scenario.requests
        )
        schedule = Schedule(scenario.config, requests)
        steps = []
        for step in scenario.steps:
            possible = None if schedule.over else _possible(step, schedule)
            if possible is not None:
                schedule.advance(possible)
                steps.append(possible)
        used = {row.request for step in steps for row in step.rows}
        requests = tuple(request for request in requests if request.id in used)
        return check(replace(scenario, requests=requests, steps=tuple(steps)))
    except ScenarioError:
        return None


def _possible(step: Step, schedule: Schedule) -> Step | None:
    """The step with the rows and ends that are possible now; None if it has no row then."""
    config, traits = schedule.config, schedule.config.traits
    k = max(config.min_draft_len, min(step.draft_len, config.max_draft_len))
    most = k if traits.drafts_for_contexts else 0
    contexts = [_steered(replace(c, chunk=_chunk(c, schedule)), config, most) for c in step.contexts]
    generations = [_possible_row(g, config, k) for g in step.generations]
    whole = replace(step, draft_len=k, contexts=tuple(contexts), generations=tuple(generations), finish=())
    whole = kept_in_step(config, whole)
    if not _fits(whole, schedule):
        # Fewer rows than were captured cannot be replayed.
        phase = Phase.EAGER if step.phase is Phase.REPLAY else step.phase
        whole = kept_in_step(config, replace(whole, phase=phase, contexts=(), generations=()))
        for context in contexts:
            more = kept_in_step(config, replace(whole, contexts=(*whole.contexts, context)))
            whole = more if _fits(more, schedule) else whole
        for generation in generations:
            more = kept_in_step(config, replace(whole, generations=(*whole.generations, generation)))
            whole = more if _fits(more, schedule) else whole
    for request in step.finish:
        more = replace(whole, finish=(*whole.finish, request))
        whole = more if _fits(more, schedule) else whole
    return whole if _fits(whole, schedule) else None


def _possible_row(row: Generation, config: Config, draft_len: int) -> Generation:
    """The row with what a generation of that draft length can have."""
    verify = None if row.verify is None or not config.ragged_verify else min(row.verify, draft_len)
    accepted = 1 if config.traits.tree else 1 + (draft_len if verify is None else verify)
    row = replace(row, accept=min(row.accept, accepted), match=_match(row, config), verify=verify)
    return _steered(row, config, draft_len)


def _steered(row: Row, config: Config, drafts: int) -> Row:
    """The row with no more agreement than so many drafts, and the configuration, can have."""
    agree = min(row.agree, 0 if config.guided_decoding and not config.traits.guides_drafts else drafts)
    return replace(
        row, agree=agree, near=min(row.near, drafts - agree) if config.use_relaxed_acceptance_for_thinking else 0
    )


def _fits(step: Step, schedule: Schedule) -> bool:
    try:
        schedule.plan(step)
    except ScenarioError:
        return False
    return True


def _chunk(row: Context, schedule: Schedule) -> int:
    """As much of the chunk as there is prompt left, one token at least; all of it where a prompt is computed in one."""
    state = None if row.request is None else schedule.requests.get(row.request)
    if state is None:
        return row.chunk
    left = max(1, state.prompt_len - state.past)
    reused = 0 if state.granted or row.request is None else schedule.reuse.found(row.request)
    return min(max(row.chunk, reused + 1), left) if schedule.config.traits.chunked_prefill else left


def _match(row: Generation, config: Config) -> int:
    """As much of the match as there can be; none without automata."""
    return min(row.match, config.max_seq_len) if config.sa_threshold and row.request is not None else 0


def _with_step(scenario: Scenario, index: int, step: Step | None) -> Scenario:
    put = () if step is None else (step,)
    return replace(scenario, steps=(*scenario.steps[:index], *put, *scenario.steps[index + 1 :]))


def _fewer_steps(scenario: Scenario) -> Iterator[Scenario]:
    for i in reversed(range(len(scenario.steps))):
        yield _with_step(scenario, i, None)


def _as_startup(scenario: Scenario) -> Iterator[Scenario]:
    """One step alone, its requests as dummies of the same lengths: what led to it is then not needed."""
    config = scenario.config
    for step, plans in reversed(list(walk(scenario))):
        if step.phase.is_startup or any(plan.is_context and plan.past for plan in plans):
            continue
        contexts = tuple(Context(request=None, chunk=plan.query) for plan in plans if plan.is_context)
        most = 1 if config.traits.tree else step.draft_len + 1
        generations = tuple(
            Generation(request=None, past=plan.past, accept=min(plan.accepted, most), verify=row.verify)
            for row, plan in zip(step.generations, plans[len(step.contexts) :])
        )
        for phase in (Phase.WARMUP, Phase.CAPTURE):
            alone = replace(step, phase=phase, contexts=contexts, generations=generations, finish=())
            yield replace(scenario, requests=(), steps=(alone,))


def _plainer_config(scenario: Scenario) -> Iterator[Scenario]:
    """Defaults: all of them at once, those of one feature at once, then one by one."""
    defaults = {f.name: f.default for f in fields(scenario.config) if f.default is not MISSING}
    yield replace(scenario, config=replace(scenario.config, **defaults))
    features = (
        ("attention_dp",),
        ("draft_num", "draft_tokens", "use_separate"),
        ("use_relaxed", "relaxed"),
        ("attention_backend", "index_topk", "window", "compress"),
    )
    for prefixes in features:
        together = {name: default for name, default in defaults.items() if name.startswith(prefixes)}
        yield replace(scenario, config=replace(scenario.config, **together))
    for name, default in defaults.items():
        yield replace(scenario, config=replace(scenario.config, **{name: default}))
    yield from _plainer_compression(scenario)
    for threshold in _below(scenario.config.sa_threshold, 1):
        yield replace(scenario, config=replace(scenario.config, sa_threshold=threshold))
    whole = float(int(scenario.config.force_num_accepted_tokens))
    yield replace(scenario, config=replace(scenario.config, force_num_accepted_tokens=whole))


def _plainer_compression(scenario: Scenario) -> Iterator[Scenario]:
    """A sparse backend that compresses nothing, no third ratio, a small window."""
    config = scenario.config
    if config.compress_ratios:
        yield replace(scenario, config=replace(config, attention_backend="DSA", window_size=0, compress_ratios=()))
        yield replace(scenario, config=replace(config, compress_ratios=config.compress_ratios[:2]))
    for window in _below(config.window_size, 1):
        yield replace(scenario, config=replace(config, window_size=window))


def _fewer_rows(scenario: Scenario) -> Iterator[Scenario]:
    for i, step in enumerate(scenario.steps):
        for j in range(len(step.contexts)):
            yield _with_step(scenario, i, replace(step, contexts=step.contexts[:j] + step.contexts[j + 1 :]))
        for j in range(len(step.generations)):
            yield _with_step(scenario, i, replace(step, generations=step.generations[:j] + step.generations[j + 1 :]))


def _smaller_graphs(scenario: Scenario) -> Iterator[Scenario]:
    """One row less in a captured graph and in its replays, which neither could lose alone."""
    for i, captured in enumerate(scenario.steps):
        if captured.phase is not Phase.CAPTURE:
            continue
        if any(row.verify is not None for row in captured.generations):
            yield replace(scenario, steps=tuple(_verifying_all(step, captured) for step in scenario.steps))
        smaller = _with_step(scenario, i, replace(captured, generations=captured.generations[1:]))
        for last in (True, False):
            yield replace(smaller, steps=tuple(_narrower(step, captured, last) for step in smaller.steps))


def _narrower(step: Step, captured: Step, last: bool) -> Step:
    """A replay of the captured step with one row less; any other step as it is.

    What goes is the last, or the first, of the rows that verify as much as the first captured one, if there are any.
    """
    if step.phase is not Phase.REPLAY or not _is_as_large(step, captured):
        return step
    verify = captured.generations[0].verify if captured.generations else None
    alike = [i for i, row in enumerate(step.generations) if row.verify == verify] or range(len(step.generations))
    gone = alike[-1] if last else alike[0]
    return replace(step, generations=step.generations[:gone] + step.generations[gone + 1 :])


def _verifying_all(step: Step, captured: Step) -> Step:
    """A step of that graph whose rows verify all of their drafts; any other step as it is."""
    if step.phase not in (Phase.CAPTURE, Phase.REPLAY) or not _is_as_large(step, captured):
        return step
    return replace(step, generations=tuple(replace(row, verify=None) for row in step.generations))


def _is_as_large(step: Step, captured: Step) -> bool:
    shapes = [(len(each.generations), each.draft_len) for each in (step, captured)]
    return shapes[0] == shapes[1]


def _plainer_ids(scenario: Scenario) -> Iterator[Scenario]:
    """Requests numbered from 0 on."""
    ids = {request.id: i for i, request in enumerate(scenario.requests)}

    def renamed(step: Step) -> Step:
        contexts = tuple(replace(c, request=None if c.request is None else ids[c.request]) for c in step.contexts)
        rows = tuple(replace(g, request=None if g.request is None else ids[g.request]) for g in step.generations)
        return replace(step, contexts=contexts, generations=rows, finish=tuple(ids[r] for r in step.finish))

    requests = tuple(
        replace(r, id=ids[r.id], prefix_of=None if r.prefix_of is None else ids.get(r.prefix_of, r.prefix_of))
        for r in scenario.requests
    )
    yield replace(scenario, requests=requests, steps=tuple(map(renamed, scenario.steps)))


def _plainer_steps(scenario: Scenario) -> Iterator[Scenario]:
    for i, step in enumerate(scenario.steps):
        if step.finish:
            yield _with_step(scenario, i, replace(step, finish=()))
        if step.phase is Phase.REPLAY:
            yield _with_step(scenario, i, replace(step, phase=Phase.EAGER))
        if step.fault is not None:
            yield _with_step(scenario, i, replace(step, fault=None))
            for occurrence in _below(step.fault.occurrence, 1):
                yield _with_step(scenario, i, replace(step, fault=replace(step.fault, occurrence=occurrence)))


def _plainer_peers(scenario: Scenario) -> Iterator[Scenario]:
    """Of other ranks: one generation, and each row less."""
    for i, step in enumerate(scenario.steps):
        for j, peer in enumerate(step.peers):
            plainer = [Peer(generations=1)] if peer.contexts else []
            plainer += [replace(peer, generations=n) for n in _below(peer.generations, 1)]
            plainer += [replace(peer, contexts=peer.contexts[1:])] if peer.contexts else []
            for plain in plainer:
                yield _with_step(scenario, i, replace(step, peers=(*step.peers[:j], plain, *step.peers[j + 1 :])))


def _smaller_draft_lens(scenario: Scenario) -> Iterator[Scenario]:
    """In all steps and the configuration at once, then in each of them."""
    config = scenario.config
    for k in _below(config.max_draft_len, 1):
        steps = tuple(replace(step, draft_len=min(step.draft_len, k)) for step in scenario.steps)
        nodes = min(config.max_total_draft_tokens, most_nodes(k, config.dynamic_tree_max_topK))
        smaller = replace(config, max_draft_len=k, max_total_draft_tokens=nodes)
        yield replace(scenario, config=smaller, steps=steps)
    for nodes in _below(config.max_total_draft_tokens, config.max_draft_len):
        yield replace(scenario, config=replace(config, max_total_draft_tokens=nodes))
    for topk in _below(config.dynamic_tree_max_topK, 2):
        yield replace(scenario, config=replace(config, dynamic_tree_max_topK=topk))
    for i, step in enumerate(scenario.steps):
        for k in _below(step.draft_len, config.min_draft_len):
            yield _with_step(scenario, i, replace(step, draft_len=k))


def _shorter_prompts(scenario: Scenario) -> Iterator[Scenario]:
    for i, request in enumerate(scenario.requests):
        plainer = [replace(request, thinking=False)] if request.thinking else []
        plainer += [] if request.prefix_of is None else [replace(request, prefix_of=None, prefix_len=0)]
        plainer += [replace(request, prompt_len=length) for length in _below(request.prompt_len, 1)]
        for shorter in plainer:
            yield replace(scenario, requests=(*scenario.requests[:i], shorter, *scenario.requests[i + 1 :]))


def _plainer_rows(scenario: Scenario) -> Iterator[Scenario]:
    for i, step in enumerate(scenario.steps):
        for j, context in enumerate(step.contexts):
            for plain in _plainer_row(context, _PLAIN_CONTEXT):
                rows = (*step.contexts[:j], plain, *step.contexts[j + 1 :])
                yield _with_step(scenario, i, replace(step, contexts=rows))
        for j, generation in enumerate(step.generations):
            verifies_all = [] if generation.verify is None else [replace(generation, verify=None)]
            for row in (*verifies_all, *_plainer_row(generation, _PLAIN_GENERATION)):
                yield _with_step(
                    scenario, i, replace(step, generations=(*step.generations[:j], row, *step.generations[j + 1 :]))
                )


def _plainer_row(row: Row, plain: Mapping[str, int]) -> Iterator[Row]:
    for field, least in plain.items():
        for value in _below(getattr(row, field), least):
            yield replace(row, **{field: value})


def _below(value: int, low: int) -> list[int]:
    """Values to try instead, the smallest first."""
    return sorted({low, (low + value) // 2, value - 1} - {value}) if value > low else []


EDITS: Final[tuple[Edit, ...]] = (
    _fewer_steps,
    _as_startup,
    _plainer_config,
    _fewer_rows,
    _smaller_graphs,
    _plainer_steps,
    _plainer_peers,
    _smaller_draft_lens,
    _shorter_prompts,
    _plainer_rows,
    _plainer_ids,
)
"""What is tried, the largest gains first."""
