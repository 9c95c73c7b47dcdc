"""What a seeded defect is: a real bug, put back into the portable engine by a patch that is easy to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from scenarios import UsageError, closest


class Patch:
    """Replaces attributes of classes and modules until the defect is taken out again."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, owner: Any, name: str, value: Any) -> None:
        """Make ``owner.name`` be ``value``. A class that only inherits ``name`` gets its own."""
        self._stack.enter_context(mock.patch.object(owner, name, value, create=name not in vars(owner)))


@dataclass(frozen=True)
class Bug:
    """A seeded defect.

    id         museum entry, then what tells its variants apart: ``TRT-01/PARDWorker``
    kind       K1..K14
    worker     the worker that it is seeded in
    title      one sentence: what is wrong
    reference  public pull requests or issues
    caught_by  slugs of the invariants that are expected to notice
    apply      seeds it
    """

    id: str
    kind: str
    worker: str
    title: str
    reference: str
    caught_by: tuple[str, ...]
    apply: Callable[[Patch], None]


BUGS: dict[str, Bug] = {}
"""Every seeded defect by id, in the order of registration."""


def bug(
    id: str, *, kind: str, worker: str, title: str, reference: str, caught_by: tuple[str, ...]
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register the decorated function as the patch of a seeded defect."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        if id in BUGS:
            raise ValueError(f"museum: {id} is registered twice; give each variant its own id")
        BUGS[id] = Bug(id, kind, worker, title, reference, caught_by, apply)
        return apply

    return register


def find(id: str) -> Bug:
    """The defect of that id; ``UsageError`` with the closest one if there is none."""
    if id not in BUGS:
        raise UsageError(f"bug: none is called {id!r}; {closest(id, BUGS)}")
    return BUGS[id]


@contextmanager
def seeded(id: str | None) -> Iterator[Bug | None]:
    """Seed a defect into the portable engine for the duration of the block; None seeds nothing.

    Classes are patched, so sessions must be opened inside the block. One defect at a time.
    """
    if id is None:
        yield None
        return
    found = find(id)
    with ExitStack() as stack:
        found.apply(Patch(stack))
        yield found
