"""A scenario told moment by moment: each served step with what was there before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from scenarios import Config, Phase, RequestState, RowPlan, Scenario, Schedule, Step


@dataclass(frozen=True)
class Moment:
    """One served step. ``before`` are the requests as they stood, ``pages_left`` what the pool still had in it."""

    config: Config
    step: Step
    rows: tuple[RowPlan, ...]
    before: dict[int, RequestState]
    pages_left: int
    finished: bool
    """Whether a request has ended earlier."""

    @property
    def k(self) -> int:
        return self.step.draft_len

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.step.contexts), len(self.step.generations)

    @property
    def accepted(self) -> list[int]:
        """Accepted tokens of each generation row."""
        return [row.accepted for row in self.rows if not row.is_context]

    @property
    def ids(self) -> list[int]:
        return [row.request for row in self.rows if row.request is not None]

    @property
    def new(self) -> list[int]:
        """Prompt lengths of the requests that enter."""
        return [self.before[r].prompt_len for r in self.ids if not self.before[r].granted]

    @property
    def absent(self) -> list[int]:
        """Requests that have started and sit this step out."""
        return [r for r, s in self.before.items() if s.active and s.past and r not in self.ids]

    def left(self, request: int) -> int:
        """Prompt tokens that the request had to go."""
        return self.before[request].prompt_len - self.before[request].past

    @property
    def finality(self) -> list[bool]:
        """For each context row, whether it completes its prompt."""
        return [row.request is not None and row.query == self.left(row.request) for row in self.rows if row.is_context]


def served(scenario: Scenario) -> Iterator[Moment]:
    """The served steps of a scenario, in order."""
    schedule = Schedule(scenario.config, scenario.requests)
    finished = False
    for step in scenario.steps:
        before = {r: replace(s) for r, s in schedule.requests.items()}
        rows = tuple(schedule.advance(step))
        if not step.phase.is_startup:
            held = {r: s.granted for r, s in before.items() if s.active} | {
                row.request: row.granted for row in rows if row.request is not None
            }
            used = sum(-(-tokens // scenario.config.tokens_per_block) for tokens in held.values())
            left = scenario.config.num_blocks - used
            yield Moment(scenario.config, step, rows, before, left, finished)
        finished = finished or bool(step.finish)


Situation = Callable[[Scenario, list[Moment]], object]


def some(predicate: Callable[[Moment], object]) -> Situation:
    """Whether one served step is like that."""
    return lambda scenario, moments: any(predicate(m) for m in moments)


def in_a_row(*predicates: Callable[[Moment], object]) -> Situation:
    """Whether served steps that follow each other are like that."""

    def situation(scenario: Scenario, moments: list[Moment]) -> bool:
        runs = zip(*(moments[i:] for i in range(len(predicates))), strict=False)
        return any(all(p(m) for p, m in zip(predicates, run, strict=True)) for run in runs)

    return situation


def together(predicate: Callable[..., object], count: int = 2) -> Situation:
    """Whether so many served steps that follow each other are like that, seen together."""
    return lambda scenario, moments: any(predicate(*moments[i : i + count]) for i in range(len(moments) - count + 1))


def startup(*phases: Phase) -> Callable[[Scenario], bool]:
    """Whether start-up goes through these phases, in this order."""

    def predicate(scenario: Scenario) -> bool:
        steps = iter(step.phase for step in scenario.steps)
        return all(phase in steps for phase in phases)

    return predicate


def both(first: Callable[[Scenario], object], then: Situation) -> Situation:
    """Both at once."""
    return lambda scenario, moments: bool(first(scenario)) and then(scenario, moments)


def reordered(earlier: Collection[int], later: Collection[int]) -> bool:
    """Whether the ids in both come in another order."""
    return [i for i in earlier if i in later] != [i for i in later if i in earlier]
