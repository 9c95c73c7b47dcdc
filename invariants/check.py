"""How an invariant compares: each comparison is counted, each that fails becomes a violation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from invariants.case import Moment
from invariants.registry import Invariant
from scenarios import Violation


def difference(expected: Any, actual: Any) -> tuple[str, Any, Any]:
    """Path, expected and actual value of the first place where two unequal JSON values differ.

    Lists of equal length and objects with equal keys are looked into; anything else differs as a whole.
    """
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs: Iterable[tuple[Any, Any, Any]] = zip(range(len(expected)), expected, actual, strict=True)
    elif isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        pairs = ((k, v, actual[k]) for k, v in expected.items())
    else:
        return "", expected, actual
    key, mine, other = next(pair for pair in pairs if pair[1] != pair[2])
    path, mine, other = difference(mine, other)
    return f"[{key}]{path}", mine, other


class Check:
    """What one invariant found in one case.

    reached  comparisons made
    held     comparisons that held
    found    (step, order within the step, violation) of those that did not
    """

    __slots__ = ("found", "held", "invariant", "reached")

    def __init__(self, invariant: Invariant) -> None:
        self.invariant = invariant
        self.reached = 0
        self.held = 0
        self.found: list[tuple[int, int, Violation]] = []

    def equal(self, moment: Moment, field: str, expected: Any, actual: Any, why: str) -> None:
        """Compare the value of ``field``; ``why`` completes "... is 3 and should be 4: "."""
        self.reached += 1
        if expected == actual:
            self.held += 1
            return
        path, mine, other = difference(expected, actual)
        message = f"{field}{path} is {other!r} and should be {mine!r}: {why}"
        self._add(moment.step, moment.order, moment.name, moment.run, field, expected, actual, message)

    def agree(self, moment: Moment, field: str, expected: Any, actual: Any, other: str) -> None:
        """Compare the value of ``field`` with that of ``other``, a name, where either of them may be the wrong one."""
        self.reached += 1
        if expected == actual:
            self.held += 1
            return
        path, theirs, own = difference(expected, actual)
        message = f"{field}{path} is {own!r} and {other}{path} is {theirs!r}: they should agree"
        self._add(moment.step, moment.order, moment.name, moment.run, field, expected, actual, message)

    def that(self, holds: bool, moment: Moment, field: str, expected: Any, actual: Any, message: str) -> None:
        """Note whether a condition on ``field`` holds; ``message`` says what is wrong when it does not."""
        self.reached += 1
        if holds:
            self.held += 1
        else:
            self._add(moment.step, moment.order, moment.name, moment.run, field, expected, actual, message)

    def run(self, holds: bool, step: int, field: str | None, expected: Any, actual: Any, message: str) -> None:
        """Note whether a condition on a whole step or run holds."""
        self.reached += 1
        if holds:
            self.held += 1
        else:
            self._add(step, -1, None, 0, field, expected, actual, message)

    def said(self, moment: Moment, fields: Iterable[str]) -> None:
        """Compare each of ``fields`` with the oracle, where both have it."""
        self._all_equal(moment, fields, moment.said, "the reference says so")

    def kept(self, moment: Moment, since: Moment, fields: Iterable[str]) -> None:
        """Compare each of ``fields`` with an earlier moment of the same step, where both have it."""
        self._all_equal(moment, fields, since.seen, f"so it was at {since.name}")

    def _all_equal(self, moment: Moment, fields: Iterable[str], expected: Mapping[str, Any], why: str) -> None:
        """Compare those of ``fields`` that were observed and have an expected value."""
        seen = moment.seen
        for field in fields:
            if field in expected and field in seen:
                self.equal(moment, field, expected[field], seen[field], why)

    def _add(
        self, step: int, order: int, substep: str | None, run: int, field: str | None, expected: Any, actual: Any,
        message: str,
    ) -> None:  # fmt: skip
        violation = Violation(
            invariant=self.invariant.slug,
            step=step,
            substep=substep,
            run=run,
            field=field,
            expected=expected,
            actual=actual,
            message=message,
        )
        self.found.append((step, order, violation))
