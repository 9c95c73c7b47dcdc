"""Twins that start up otherwise: graphs of other values, after another number of forwards, or of exact size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from invariants.twins import Edited, padded, real, valid
from scenarios import Config, Generation, Peer, Phase, Scenario, Step

SOME_WARMUP_RUNS = 4


def other_values(scenario: Scenario) -> Edited | None:
    """The scenario with graphs captured with other lengths, accepted counts and drafts. Pairs: served steps.

    None where nothing is replayed, and where no other lengths fit.
    """
    if not any(step.phase is Phase.REPLAY for step in scenario.steps):
        return None
    pairs = [(i, i) for i, step in enumerate(scenario.steps) if not step.phase.is_startup]
    for longer in (3, 1, -1):
        steps = (_captured_with(scenario.config, step, longer) for step in scenario.steps)
        edited = valid(scenario, steps, pairs)
        if edited is not None:
            return edited
    return None


def _captured_with(config: Config, step: Step, longer: int) -> Step:
    """A capture step whose dummies are longer and accept other counts; any other step as it is.

    Each verifies as many drafts as the next one did, so that the graph is for the same number of rows.
    """
    if step.phase is not Phase.CAPTURE:
        return step
    only = config.traits.tree or config.force_num_accepted_tokens
    rows = []
    for row, other in zip(step.generations, step.generations[1:] + step.generations[:1], strict=True):
        most = 1 + (step.draft_len if other.verify is None else other.verify)
        rows.append(
            replace(
                row,
                past=row.past + longer,
                accept=row.accept if only else row.accept % most + 1,
                agree=step.draft_len - row.agree,
                near=0,
                verify=other.verify,
            )
        )
    return replace(step, generations=tuple(rows))


def other_warmup_runs(scenario: Scenario) -> Edited | None:
    """The scenario without forwards before each capture, or with some where it has none. Pairs: all steps."""
    if not any(step.phase is Phase.CAPTURE for step in scenario.steps):
        return None
    runs = 0 if scenario.config.graph_warmup_runs else SOME_WARMUP_RUNS
    twin = replace(scenario, config=replace(scenario.config, graph_warmup_runs=runs))
    return valid(twin, scenario.steps, ((i, i) for i in range(len(scenario.steps))))


def exact_size(scenario: Scenario) -> Edited | None:
    """The scenario with a graph for each padded batch that has just its size, replayed in place of the larger one.

    The other ranks, whose batches it was padded to, have no more rows than this one then. Pairs: every step from the
    first such replay on.
    """
    wanted = {index: _without_padding(scenario, step) for index, step in enumerate(scenario.steps)}
    sizes = {(len(step.generations), step.draft_len) for step in wanted.values() if step is not None}
    steps: list[Step] = []
    pairs: list[tuple[int, int]] = []
    for index, step in enumerate(scenario.steps):
        unpadded = wanted[index]
        if unpadded is not None or pairs:
            pairs.append((index, len(steps)))
        steps.append(unpadded or step)
        if step.phase is Phase.CAPTURE and step.fault is None:
            steps += _smaller(step, sizes)
    return valid(scenario, steps, pairs)


def _without_padding(scenario: Scenario, step: Step) -> Step | None:
    """A replay that is padded as one that is not; None for any other step, and where there is nothing but padding."""
    rows = real(step)
    if step.phase is not Phase.REPLAY or not 0 < len(rows) < len(step.generations):
        return None
    peers = tuple(Peer(generations=min(peer.generations, len(rows))) for peer in step.peers)
    return padded(scenario, replace(step, generations=rows, peers=peers))


def _smaller(captured: Step, sizes: Iterable[tuple[int, int]]) -> list[Step]:
    """Captures with fewer of the same dummies, in the sizes that are asked for."""
    rows: tuple[Generation, ...] = captured.generations
    return [
        replace(captured, generations=rows[:size])
        for size, draft_len in sorted(sizes)
        if draft_len == captured.draft_len and size < len(rows)
    ]
