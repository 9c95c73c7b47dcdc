"""Whole scenarios, clean and with a fault."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from hypothesis import strategies as st

from scenarios import Config, Scenario, UsageError
from strategies.choices import in_range, pick
from strategies.composer import Composer, Record
from strategies.config import DENSE, configs, room_of

_FAILS: Final = 9
_FAILS_WITH_DRAFTS: Final = 3
"""One step in so many fails, and the last but one if none before it has: more of those that may verify drafts."""
_FAILS_AGAIN: Final = 4
"""One step in so many fails of those that follow a failure: only a second one shows that the first was counted."""
_FAILS_RATHER: Final = 2
"""The same after one of start-up, which is not counted, and where one more may be too many, even if it is the last."""


def scenarios(
    *,
    config: Config | st.SearchStrategy[Config] | None = None,
    workers: Collection[str] | None = None,
    backends: Collection[str] = DENSE,
    variants: Collection[str] = (),
    max_draft_len: int = 7,
    max_batch: int = 8,
    max_steps: int = 5,
    with_startup: bool = True,
) -> st.SearchStrategy[Scenario]:
    """Scenarios without faults: start-up, then served batches, eager and replayed, whose requests come and go.

        scenarios(workers=["MTPEagleWorker"], max_steps=3)

    config        one configuration, or a strategy for it, instead of the options of ``configs``
    max_steps     most steps, start-up included
    with_startup  whether warm-up and graph capture may come first, and so replays later

    ``workers``, ``backends``, ``variants``, ``max_draft_len`` and ``max_batch`` are those of ``configs``.

    Every scenario passes ``scenarios.check``, and nothing is rejected while drawing. Shrinks to one request of one
    token in one eager step with draft length 1. Raises ``UsageError`` for an argument that is out of range.
    """
    in_range("scenarios", "max_steps", max_steps, 1)
    source = config_source("scenarios", config, workers, backends, variants, max_draft_len, max_batch)
    return _scenarios(source, _sizes(1, max_steps), with_startup, None)


def faulted_scenarios(
    *,
    record: Record,
    config: Config | st.SearchStrategy[Config] | None = None,
    workers: Collection[str] | None = None,
    backends: Collection[str] = DENSE,
    variants: Collection[str] = (),
    max_draft_len: int = 7,
    max_batch: int = 8,
    max_steps: int = 6,
    with_startup: bool = True,
) -> st.SearchStrategy[Scenario]:
    """Scenarios in which a step fails, and sometimes later ones; if that is tolerated an ordinary one comes last.

    None follows where it hangs on the place of the failure what later steps accept by force, nor where one more failure
    might be too many.

    record  is called with the scenario up to and including the step that is to fail, without the fault. It returns
            the sites of that last step, site -> occurrences. It must give equal answers to equal questions. For a
            step without sites it returns an empty mapping; a later one fails instead, but never the very last.

    The other options are those of ``scenarios``; ``max_steps`` is at least 2. Shrinks to one request that fails in
    the first step and, where that is tolerated, another one in the second. Raises ``UsageError`` for an argument that
    is out of range.
    """
    in_range("faulted_scenarios", "max_steps", max_steps, 2)
    source = config_source("faulted_scenarios", config, workers, backends, variants, max_draft_len, max_batch)
    return _scenarios(source, _faulted_sizes(max_steps), with_startup, record)


def _sizes(least: int, most: int) -> st.SearchStrategy[int]:
    """Numbers of steps; the larger ones more often, as each step finds more to go wrong than the one before it."""
    larger = range((least + most) // 2 + 1, most + 1)
    return st.sampled_from((*range(least, most + 1), *larger, most, max(least, most - 1), most))


def _faulted_sizes(most: int) -> st.SearchStrategy[int]:
    """Numbers of steps from 2 on; half of the time a prompt, a step that fails and another one, which take no time.

    Longer ones, in which a graph is captured before and what is left may be met late, are rather among the longest.
    """
    longer = range(4, most + 1)
    return st.sampled_from((*range(2, most + 1), *longer[-2:], *(min(3, most),) * (2 * len(longer[:2]))))


def config_source(
    strategy: str,
    config: object,
    workers: Collection[str] | None,
    backends: Collection[str],
    variants: Collection[str],
    max_draft_len: int,
    max_batch: int,
) -> st.SearchStrategy[Config]:
    """Where ``strategy`` takes its configurations from: the one given, or ``configs``."""
    if config is None:
        return configs(
            workers=workers, backends=backends, variants=variants, max_draft_len=max_draft_len, max_batch=max_batch
        )
    if isinstance(config, Config):
        room_of(strategy, config)
        return st.just(config)
    if not isinstance(config, st.SearchStrategy):
        raise UsageError(f"{strategy}(): config is {config!r}; write a Config or a strategy for one")
    return config


@st.composite
def _scenarios(
    draw: st.DrawFn,
    config: st.SearchStrategy[Config],
    sizes: st.SearchStrategy[int],
    with_startup: bool,
    record: Record | None,
) -> Scenario:
    size = draw(sizes)
    drawn = draw(config)
    # What is known of pages takes several requests, one after the other.
    share = 3 if drawn.enable_block_reuse else 2
    composer = Composer(drawn, startup=size // share if with_startup else 0)
    step = _steps(composer, size, record)
    while len(composer.steps) < size and not composer.over:
        draw(step)
    return composer.scenario()


@st.composite
def _steps(draw: st.DrawFn, composer: Composer, size: int, record: Record | None) -> None:
    """The next step. A strategy of its own, so that Hypothesis sees where a step begins and ends."""
    left = size - len(composer.steps)
    schedule = composer.schedule
    failed = composer.failures
    # If those of start-up were counted, one more would be too many by now.
    spent = 0 < failed >= schedule.config.error_budget
    if record is None or (left == 1 and not spent):
        composer.draw_step(draw)
    elif failed:
        one_in = _FAILS_AGAIN if schedule.failures and not spent else _FAILS_RATHER
        if pick(draw, one_in) == one_in - 1:
            composer.draw_failure(draw, record)
        else:
            composer.draw_step(draw)
    elif left == 2 or not pick(draw, _FAILS_WITH_DRAFTS if composer.schedule.generating else _FAILS):
        composer.draw_failure(draw, record)
    else:
        composer.draw_step(draw)
