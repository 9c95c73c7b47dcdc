"""A scenario while it is being composed: each step drawn from what is possible at that point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from scenarios import Config, Phase, Request, Scenario, Schedule, Step
from scenarios import forced_acceptance as forced
from strategies.choices import Draw, choose, pick
from strategies.config import draw_request, room_of
from strategies.drafting import draw_draft_len
from strategies.fault import KINDS, Kinds, draw_fault
from strategies.layout import Layout, Room, Space, draw_layout, runnable
from strategies.phase import phase_table, replayable
from strategies.prefixes import next_to_go
from strategies.ranks import draw_idle, draw_peers
from strategies.sizes import least_draft_len
from strategies.startup import draw_dummies

Record = Callable[[Scenario], Mapping[str, int]]
"""Runs a scenario without faults and returns the sites of its last step: site -> occurrences."""


_IDLE: Final = 9
"""One of so many steps is an iteration that only processes the step in flight."""


class Composer:
    """Steps of one scenario, appended one by one; valid by construction and never at a dead end.

    Whatever is drawn is read as something that can happen now, so nothing is rejected, and a scenario of which
    Hypothesis changes an early choice keeps its later ones. Requests enter when a step first needs them.
    """

    def __init__(self, config: Config, *, startup: int) -> None:
        """Start with ``config`` and at most ``startup`` steps of start-up; ``UsageError`` if it holds no request."""
        room_of("scenarios", config)
        self.schedule = Schedule(config)
        self.startup = startup
        self.requests: list[Request] = []
        self.steps: list[Step] = []

    @property
    def over(self) -> bool:
        """Whether a fault has ended the run, or has left open what later steps accept by force."""
        return self.schedule.over or self.schedule.counter is None

    @property
    def failures(self) -> int:
        """Steps with a fault, those of start-up included."""
        return sum(step.fault is not None for step in self.steps)

    def scenario(self) -> Scenario:
        """What has been composed so far."""
        return Scenario(config=self.schedule.config, requests=tuple(self.requests), steps=tuple(self.steps))

    def draw_step(self, draw: Draw, phase: Phase | None = None) -> None:
        """Append a step that succeeds, with the requests that end after it."""
        self._succeed(draw, self._draw_rows(draw, phase))

    def draw_failure(
        self, draw: Draw, record: Record, *, phase: Phase | None = None, kinds: Kinds = KINDS, last: bool = True
    ) -> None:
        """Append a step that fails in one of the ``kinds`` for its phase.

        It succeeds if it has no site, or if it must not be the ``last`` and would leave open what later ones accept.
        """
        step = self._draw_rows(draw, phase, fails=True)
        scenario = self.scenario()
        known = not forced.draws(scenario.config.force_num_accepted_tokens, step.draft_len)
        sites = record(replace(scenario, steps=(*scenario.steps, step))) if known or last else {}
        if sites and step.rows:
            self._append(replace(step, fault=draw_fault(draw, sites, kinds[step.phase])))
        else:
            self._succeed(draw, step)

    def _succeed(self, draw: Draw, step: Step) -> None:
        self._append(step)
        if not step.rows:
            return
        self._finish(self._draw_finish(draw))
        if not self._can_go_on():
            self._finish(self._started)

    def _append(self, step: Step) -> None:
        self.schedule.advance(step)
        self.steps.append(step)

    def _finish(self, requests: list[int]) -> None:
        """Let requests end after the last step."""
        if requests:
            last = self.steps[-1]
            self.steps[-1] = replace(last, finish=(*last.finish, *requests))
            for request in requests:
                self.schedule.end(request)

    @property
    def _started(self) -> list[int]:
        return [r for r, s in self.schedule.requests.items() if s.active and not s.ending and s.past]

    def _can_go_on(self) -> bool:
        """Whether a request could run in the next step, or a new one enter; if need be after an idle iteration."""
        least = least_draft_len(self.schedule.config)
        schedules = [self.schedule]
        if self.schedule.in_flight:
            landed = self.schedule.fork()
            landed.advance(Step(draft_len=least))
            schedules.append(landed)
        return any(Room(schedule, least).takes_prompt or runnable(schedule, least) for schedule in schedules)

    def _draw_finish(self, draw: Draw) -> list[int]:
        """One request or all of them; mostly none."""
        started = self._started
        if not started:
            return []
        # With overlap what follows an end is worth more than what goes on; where pages are reused it is all there is.
        rarely = 2 if self.schedule.reuse.enabled else 3 if self.schedule.in_flight else 8
        # One that is alone is spared the choice of all: somebody should be there when the next one enters.
        choice = pick(draw, rarely * len(started) + rarely)
        everybody = choice == len(started) + 1 and len(started) > 1
        return started if everybody else started[choice - 1 : choice] if choice else []

    def _draw_rows(self, draw: Draw, phase: Phase | None, *, fails: bool = False) -> Step:
        """The next step, without those that end after it, and without the fault if it ``fails``."""
        if phase is None:
            # Without start-up there is no graph either, hence nothing to choose.
            startup = len(self.steps) < self.startup
            phase = choose(draw, phase_table(self.schedule, with_startup=startup)) if self.startup else Phase.EAGER
        draft_len = draw_draft_len(draw, self.schedule.config, of_dummies=phase is Phase.WARMUP, fails=fails)
        if phase.is_startup:
            step = draw_dummies(draw, self.schedule, phase, draft_len)
            if step is not None:
                return step
            draft_len = max(draft_len, least_draft_len(self.schedule.config))
        return self._draw_served(draw, draft_len, replay=phase is Phase.REPLAY)

    def _draw_served(self, draw: Draw, draft_len: int, *, replay: bool) -> Step:
        sizes: dict[int, list[int]] = {}
        if self.schedule.in_flight and pick(draw, _IDLE) == _IDLE - 1:
            return Step(draft_len=draft_len)
        idle = draw_idle(draw, self.schedule, draft_len, self.steps[-1] if self.steps else None)
        if idle is not None:
            return idle
        if replay:
            draft_len, sizes = self._nearest_graphs(draft_len)
        layout = self._draw_layout(draw, draft_len, sizes)
        if not layout.contexts and not layout.generations:
            draft_len, sizes = least_draft_len(self.schedule.config), {}
            layout = self._draw_layout(draw, draft_len, sizes)
        if not layout.contexts and not layout.generations:
            # All pages are those of requests that end with the step in flight, or that it has yet to give back.
            return Step(draft_len=draft_len)
        # Generations that fit one by one need not fit together, so there may be fewer than a graph has.
        replayed = not layout.contexts and len(layout.generations) in sizes
        step = Step(
            phase=Phase.REPLAY if replayed else Phase.EAGER,
            draft_len=draft_len,
            contexts=layout.contexts,
            generations=layout.generations,
        )
        return draw_peers(draw, self.schedule, step, sizes)

    def _nearest_graphs(self, draft_len: int) -> tuple[int, dict[int, list[int]]]:
        """The draft length nearest to ``draft_len`` for which graphs could be replayed; their rows by batch size."""
        possible = replayable(self.schedule)
        nearest = min((k for _, k, _ in possible), key=lambda k: abs(k - draft_len))
        graphs: dict[int, list[int]] = {}
        for size, k, rows in possible:
            if k == nearest:
                graphs.setdefault(size, []).append(rows)
        return nearest, graphs

    def _draw_layout(self, draw: Draw, draft_len: int, sizes: dict[int, list[int]]) -> Layout:
        return draw_layout(draw, self.schedule, draft_len, arrive=lambda space: self._arrive(draw, space), graphs=sizes)

    def _arrive(self, draw: Draw, space: Space) -> int:
        oldest = next_to_go(self.schedule, self.requests)
        request = draw_request(draw, self.schedule.config, len(self.requests), space, oldest)
        self.requests.append(request)
        self.schedule.add(request)
        return request.id
