"""Whether steps can come next: checked at once where they are told beforehand, else one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from scenarios import Config, Request, Schedule, Step


class Plan:
    """The steps of one session. Raises ``ScenarioError`` where one could not come next."""

    def __init__(self, config: Config, requests: tuple[Request, ...]) -> None:
        self._schedule: Schedule | None = Schedule(config, requests)
        self._ahead: deque[Step] = deque()
        """Steps that were checked and are to come."""
        self._behind: list[Step] = []
        """Steps that were checked and have come, which the schedule has not been told."""

    def add(self, request: Request) -> None:
        """One more request is queued; steps to come are to be checked again."""
        if self._schedule is not None:
            self._catch_up()
            self._schedule.add(request)

    def foresee(self, steps: Iterable[Step], begin: int) -> None:
        """Check all steps to come, the first of which has index ``begin``, up to one that ends the run."""
        if self._schedule is not None:
            self._catch_up()
            ahead = self._schedule.fork()
            for index, step in enumerate(steps, begin):
                if ahead.over:
                    break
                ahead.advance(step, f"steps[{index}]")
                self._ahead.append(step)

    def take(self, step: Step, index: int) -> None:
        """This step comes next; it is checked unless it was foreseen."""
        if self._ahead and self._ahead[0] is step:
            self._behind.append(self._ahead.popleft())
        elif self._schedule is not None:
            self._catch_up()
            self._schedule.advance(step, f"steps[{index}]")

    def leave(self) -> None:
        """The run has left its plan: nothing that comes is checked any more."""
        self._schedule = None

    def _catch_up(self) -> None:
        assert self._schedule is not None
        for step in self._behind:
            self._schedule.advance(step)
        self._behind.clear()
        self._ahead.clear()
