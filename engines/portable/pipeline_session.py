"""Sessions over two ranks of a pipeline, of which the last one has the worker."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from engines.portable.pyexecutor.pipeline import PPRelay
from engines.portable.session import PortableSession
from scenarios import Request, Step, StepTrace, Substep, Trace
from scenarios.trace import PREPARED, UPDATED

_OF_THE_LAST: Final = frozenset({"identity", "slot_owners", "racing_copies"})
"""What is shown of a prepared step and depends on the forward of the worker."""
_OF_THE_HOST: Final = frozenset(
    {
        *("emitted", "py_rewind_len", "py_num_accepted_draft_tokens", "kv_tokens", "kv_blocks", "free_blocks"),
        "connector_block_ids",
    }
)
"""What the host makes of a step; the caches and slots of drafters are the last rank's alone."""


class PipelineSession:
    """Two ranks that live through the same scenario; see ``engines.base.Session``.

    Of the last one all is shown but for what is prepared and what the host makes of a step: these are the other one's.
    When the last one has failed, the other one is not asked any more.
    """

    def __init__(self, last: PortableSession, other: PortableSession) -> None:
        self._last, self._other = last, other
        self._apart = False
        PPRelay().connect(last.model_engine, other.model_engine)

    def add(self, request: Request) -> None:
        """Queue a request on both ranks."""
        self._last.add(request)
        self._other.add(request)

    def foresee(self, steps: Collection[Step]) -> None:
        """Tell both ranks all steps to come."""
        self._last.foresee(steps)
        self._other.foresee(steps)

    def step(self, step: Step) -> StepTrace:
        """Execute one iteration on both ranks; raises ``ScenarioError`` for a step that could not come next."""
        last = self._last.step(step)
        if self._apart or last.outcome != "ok":
            self._apart = True
            return last
        other = self._other.step(step)
        self._apart = other.outcome != "ok"
        return _seen_on(last, other)

    def trace(self) -> Trace:
        """Everything so far, once what is in flight has been processed."""
        last, other = self._last.trace(), self._other.trace()
        shown = [_seen_on(*ranks) for ranks in zip(last.steps, other.steps)]
        return replace(last, steps=(*shown, *last.steps[len(shown) :]))

    def close(self) -> None:
        """Take every wrapper off again and drop the graphs."""
        self._last.close()
        self._other.close()


def _seen_on(last: StepTrace, other: StepTrace) -> StepTrace:
    """A step with what is prepared, and with what the host makes of it, on the other rank."""
    theirs = {(substep.name, substep.run): substep for substep in other.substeps}
    substeps = tuple(_mixed(substep, theirs.get((substep.name, substep.run))) for substep in last.substeps)
    return replace(last if other.outcome == "ok" else other, substeps=substeps)


def _mixed(mine: Substep, theirs: Substep | None) -> Substep:
    if theirs is None or mine.name not in (PREPARED, UPDATED):
        return mine
    shown = _OF_THE_HOST if mine.name == UPDATED else theirs.fields.keys() - _OF_THE_LAST
    return replace(mine, fields={**mine.fields, **{name: theirs.fields[name] for name in shown & theirs.fields.keys()}})
