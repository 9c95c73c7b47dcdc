"""Errors that a person can act on: one line that names the object, says what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_MANY: Final = 16
"""More names than a person wants to read."""
_PART: Final = 3
"""Letters of a part of a name from which on it may stand for the whole."""


class UsageError(ValueError):
    """Input, configuration or environment that the suite cannot work with (exit status 2).

    ``str()`` is always one line, and no text of a stranger's file can steer the terminal with it.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in " ".join(message.split())))


class ScenarioError(UsageError):
    """A scenario, trace or finding that is not valid.

    ``field`` is the path of the offending value, for instance ``steps[1].generations[0].agree``.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def within(self, prefix: str) -> ScenarioError:
        """The same error with ``prefix`` put before the path of its field."""
        joint = "" if not self.field or self.field.startswith("[") else "."
        return type(self)(f"{prefix}{joint}{self.field}", self.problem, self.remedy)


def require(condition: bool, field: str, problem: str, remedy: str) -> None:
    """Raise ``ScenarioError`` unless ``condition`` holds."""
    if not condition:
        raise ScenarioError(field, problem, remedy)


def closest(name: str, names: Iterable[str], *, listed: str = "") -> str:
    """A remedy for an unknown ``name``: the known one that is nearest to it.

    When none is near, all names are listed or, if they are many, the three nearest.

    listed  where a person finds all of them; of many names it is named instead of the three
    """
    known = sorted(names)
    lowered = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    near = near or [k for k in lowered if len(name) >= _PART and name.lower() in k][:1]
    if near:
        return f"did you mean {lowered[near[0]]!r}?"
    if len(known) > _MANY:
        if listed:
            return f"see {listed}"
        near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.0)
        return f"the nearest of {len(known)} are " + ", ".join(lowered[k] for k in near)
    return "write one of " + ", ".join(known) if known else "none is known"


def outside(least: int, most: int) -> str:
    """What is wrong with a number that is not in a range, in words that follow "is"."""
    return f"outside {least}..{most}" if least < most else f"not {least}"
