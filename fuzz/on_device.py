"""Many scenarios whose sub-steps are compared on the device, and asked about once in a while.

What the oracle expects of a step goes to the device with it; nothing is read back but whether anything differed, once
for many steps. A scenario in which something did runs once more with full traces, which say what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import reference
from engines.base import Engine, run
from invariants import verify
from scenarios import Scenario, Trace, Violation

if TYPE_CHECKING:
    from engines.portable import PortableEngine

READ_EVERY: Final = 1000
"""Steps between two readings."""


@dataclass(frozen=True)
class DeviceFinding:
    """A scenario in which something on the device was not what it should be.

    step        index of the step
    mismatch    what differed first
    violations  what the full traces of another run say; none if they know nothing of it
    """

    scenario: Scenario
    step: int
    mismatch: str
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        said = "; ".join(violation.message for violation in self.violations[:1])
        return f"steps[{self.step}] {self.mismatch}: {said or 'full traces show nothing'}"


class DeviceHunt:
    """Runs scenarios on one engine, and asks its device once for ``read_every`` steps or more.

    ``after_step`` is called with the number of steps so far.
    """

    def __init__(
        self,
        engine: PortableEngine,
        *,
        read_every: int = READ_EVERY,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        import torch

        from engines.portable import Mismatches

        self.scenarios = self.steps = self.readings = 0
        self._engine = engine
        self._mismatches = Mismatches(torch.device(engine.device))
        self._read_every = read_every
        self._read_at = 0
        self._after_step = after_step

    def run(self, scenario: Scenario) -> DeviceFinding | None:
        """Run a scenario; a finding may be of one that ran before it."""
        self.scenarios += 1
        expected = reference.trace(scenario, in_graphs=True).steps
        said = iter(expected)
        session = self._engine.open_checked(
            scenario.config, scenario.requests, lambda _: next(said), self._mismatches, caches=True
        )
        try:
            session.foresee(scenario.steps)
            for i, (step, wanted) in enumerate(zip(scenario.steps, expected)):
                self._mismatches.begin_step((scenario, i))
                outcome = session.step(step).outcome
                self.steps += 1
                if self._after_step is not None:
                    self._after_step(self.steps)
                if outcome != wanted.outcome:
                    return self._wrong_outcome()
            # With overlap the last step is processed here, and may fail in that.
            if [step.outcome for step in session.trace().steps] != [step.outcome for step in expected]:
                return self._wrong_outcome()
        finally:
            session.close()
        return self.read() if self.steps - self._read_at >= self._read_every else None

    def _wrong_outcome(self) -> DeviceFinding | None:
        """Note that a step did not end as it should, which only the host sees, and ask the device."""
        self._mismatches.misfit("failed", 0, "outcome")
        return self.read()

    def read(self) -> DeviceFinding | None:
        """Ask the device about all that ran since it was asked last."""
        self.readings += 1
        self._read_at = self.steps
        mismatch = self._mismatches.read()
        if mismatch is None:
            return None
        scenario, step = mismatch.step

        def traced(scenario: Scenario) -> Trace:
            return run(cast(Engine, self._engine), scenario)

        violations = verify(scenario, traced, relations=False).violations
        return DeviceFinding(scenario, step, str(mismatch), violations)
