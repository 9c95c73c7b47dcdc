"""Many scenarios whose sub-steps are compared on the device, and asked about once in a while.

What the oracle expects of a step goes to the device with it; nothing is read back but whether anything differed, once
for many steps. A scenario in which something did runs once more with full traces, which say what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import reference
from engines.base import run
from invariants import verify
from scenarios import Scenario, StepTrace, Trace, Violation

if TYPE_CHECKING:
    from engines.portable import Mismatches, PortableEngine

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


@dataclass
class DeviceRun:
    """What ran, and what was found."""

    scenarios: int = 0
    steps: int = 0
    readings: int = 0
    findings: list[DeviceFinding] = field(default_factory=list)


def check_on_device(
    scenarios: Iterable[Scenario],
    engine: PortableEngine,
    *,
    max_steps: int | None = None,
    read_every: int = READ_EVERY,
    after_step: Callable[[int], None] | None = None,
) -> DeviceRun:
    """Run scenarios until there are no more, or ``max_steps`` steps have run, or something was found.

    ``after_step`` is called with the number of steps so far. A scenario that is under way is run to its end.
    """
    import torch

    from engines.portable import Mismatches

    mismatches = Mismatches(torch.device(engine.device))
    done, read_at = DeviceRun(), 0
    for scenario in scenarios:
        done.scenarios += 1
        for outcomes_agree in _steps(scenario, engine, mismatches):
            done.steps += 1
            if after_step is not None:
                after_step(done.steps)
            if not outcomes_agree:
                mismatches.misfit("failed", 0, "outcome")
        over = max_steps is not None and done.steps >= max_steps
        if over or done.steps - read_at >= read_every:
            read_at = done.steps
            if _read(engine, mismatches, done) or over:
                return done
    _read(engine, mismatches, done)
    return done


def _steps(scenario: Scenario, engine: PortableEngine, mismatches: Mismatches) -> Iterator[bool]:
    """Run a scenario; for each step whether it ended as the oracle says."""
    expected = reference.trace(scenario, in_graphs=True).steps
    steps: Iterator[StepTrace] = iter(expected)
    session = engine.open_checked(scenario.config, scenario.requests, lambda _: next(steps), mismatches)
    try:
        for i, step in enumerate(scenario.steps[: len(expected)]):
            mismatches.begin_step((scenario, i))
            agree = session.step(step).outcome == expected[i].outcome
            yield agree
            if not agree:
                return
    finally:
        session.close()


def _read(engine: PortableEngine, mismatches: Mismatches, done: DeviceRun) -> bool:
    """Ask the device; says whether there is a finding."""
    done.readings += 1
    mismatch = mismatches.read()
    if mismatch is None:
        return False
    scenario, step = mismatch.step

    def traced(scenario: Scenario) -> Trace:
        return run(engine, scenario)

    violations = verify(scenario, traced, relations=False).violations
    done.findings.append(DeviceFinding(scenario, step, str(mismatch), violations))
    return True
