"""Twins that draft or verify otherwise: with other numbers in each step, what is served is the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from invariants.twins import Edited, padded, valid
from scenarios import Context, Generation, Phase, Scenario, Step


def other_draft_lengths(scenario: Scenario) -> Edited | None:
    """The scenario served by Python with another draft length in each step, or the least where those do not fit.

    Drafts agree, and are verified, as far as they were, or as there are any. Pairs: served steps. None where there is
    one length only, where no draft is verified, and where it decides the text which drafts are accepted.
    """
    config = scenario.config
    low, count = config.min_draft_len, config.max_draft_len - config.min_draft_len + 1
    verifies = any(step.generations for step in scenario.steps if not step.phase.is_startup)
    if count == 1 or not verifies or config.use_relaxed_acceptance_for_thinking:
        return None

    def another(index: int, draft_len: int) -> int:
        return low + (draft_len - low + 1 + index % (count - 1)) % count

    return _drafting(scenario, another) or _drafting(scenario, lambda index, draft_len: low)


def all_verified(scenario: Scenario) -> Edited | None:
    """The scenario in which each generation verifies all of its drafts. Pairs: served steps.

    None where each does already.
    """
    if all(row.verify is None for step in scenario.steps for row in step.generations):
        return None
    steps = [
        replace(step, generations=tuple(replace(row, verify=None) for row in step.generations))
        for step in scenario.steps
    ]
    pairs = ((i, i) for i, step in enumerate(steps) if not step.phase.is_startup)
    return valid(replace(scenario, config=replace(scenario.config, ragged_verify=False)), steps, pairs)


def _drafting(scenario: Scenario, length: Callable[[int, int], int]) -> Edited | None:
    """The served steps with draft lengths by index and by what they are; None if upstream could not produce it."""
    served = [(i, step) for i, step in enumerate(scenario.steps) if not step.phase.is_startup]
    steps = [_with_length(scenario, step, length(index, step.draft_len)) for index, step in served]
    return valid(scenario, steps, ((index, place) for place, (index, _) in enumerate(served)))


def _with_length(scenario: Scenario, step: Step, draft_len: int) -> Step:
    contexts: tuple[Context, ...] = tuple(
        replace(row, agree=min(row.agree, draft_len), near=0) for row in step.contexts
    )
    generations: tuple[Generation, ...] = tuple(
        replace(
            row,
            agree=min(row.agree, draft_len),
            near=0,
            verify=None if row.verify is None else min(row.verify, draft_len),
        )
        for row in step.generations
    )
    step = replace(step, phase=Phase.EAGER, draft_len=draft_len, contexts=contexts, generations=generations)
    return padded(scenario, step)
