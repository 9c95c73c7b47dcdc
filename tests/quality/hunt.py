"""Hunts the wrong rules of the oracle with the search that ``specfuzz run`` uses.

    python -m tests.quality.hunt [NAME ...]

Prints for each how many scenarios and seconds it took, then both medians; ends with 1 if one escapes. Seconds are of
one core, making the scenario small included: as in ``specfuzz museum``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from engines.base import run
from fuzz.commands import BUG_CASES
from fuzz.engines import PORTABLE, load
from fuzz.events import BatchFinished, FindingFound, Tally
from fuzz.report import table
from fuzz.small import small_scenario
from fuzz.unit import Unit
from fuzz.work import run_unit
from museum.bug import EAGLE3
from scenarios import UsageError, closest
from tests.quality import (  # noqa: F401 - each registers its rules
    backend_rules,
    combined_rules,
    overlap_rules,
    ragged_rules,
    reuse_rules,
    row_rules,
    worker_rules,
)
from tests.quality.wrong_rules import RULES, planted

Hunted = tuple[str | None, Tally]
"""The invariant that is violated, None if none is, and what it took."""


def hunt(name: str, *, seed: int = 0, cases: int = BUG_CASES) -> Hunted:
    """Search until the wrong rule is found or the budget is spent."""
    found, tally = None, Tally()
    with planted(name) as rule:
        unit = Unit(engine=PORTABLE, device="cpu", worker=rule.worker, seed=seed, max_cases=cases, first=True)
        for event in run_unit(unit):
            if isinstance(event, BatchFinished):
                tally += event.tally
            elif isinstance(event, FindingFound):
                found = event.finding.invariant
    return found, tally


def main(names: Sequence[str]) -> int:
    """Hunt those of the names, or all."""
    for name in names:
        if name not in RULES:
            raise UsageError(f"NAME: no wrong rule is called {name!r}; {closest(name, RULES)}")
    # Torch imports much of itself in the first capture; no rule should be charged for that.
    run(load(PORTABLE, "cpu"), small_scenario(EAGLE3))
    hunted = {name: hunt(name) for name in names or RULES}
    rows = [(name, found or "-", took.cases, round(took.seconds, 2)) for name, (found, took) in hunted.items()]
    print(*table(("rule", "found by", "cases", "seconds"), [*rows]), sep="\n")
    print()
    cases, seconds = (median(row[column] for row in rows) for column in (2, 3))
    print(f"median {cases:g} cases, {seconds:.2f} s")
    escaped = [name for name, (found, _) in hunted.items() if found is None]
    print(f"{len(rows) - len(escaped)} of {len(rows)} wrong rules found")
    return 1 if escaped else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"hunt: {error}")
