"""What a seeded defect is: a real bug, put back into the portable engine by a patch that is easy to read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from scenarios import UsageError, closest

EAGLE3: Final = "Eagle3OneModelWorker"
MTP_EAGLE: Final = "MTPEagleWorker"
DRAFT_TARGET: Final = "DraftTargetOneModelWorker"
PARD: Final = "PARDWorker"
MTP: Final = "MTPWorker"
SA: Final = "SAWorker"
DFLASH: Final = "DFlashWorker"
DSPARK: Final = "DSparkWorker"
EAGLE3_TREE: Final = "Eagle3OneModelDynamicTreeWorker"
MTP_EAGLE_TREE: Final = "MTPEagleDynamicTreeWorker"

_ABSENT: Final = object()


class Patch:
    """Replaces attributes of classes and modules until the defect is taken out again."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, owner: Any, name: str, value: Any) -> None:
        """Make ``owner.name`` be ``value``. A class that only inherits ``name`` gets its own.

        Raises ``AttributeError`` for a name that the owner does not know: such a patch would change nothing.
        """
        getattr(owner, name)
        # As it is kept, not as it is got: a class method would come back as one that is bound.
        self._stack.callback(_put_back, owner, name, vars(owner).get(name, _ABSENT))
        setattr(owner, name, value)


def baked(values: Sequence[int], device: Any) -> Any:
    """``values`` as int64 [n] on ``device``, filled in one by one: a graph that is being captured keeps them.

    A copy would not do: that of a pageable tensor ends a capture, and one of a pinned tensor has each replay read host
    memory that is somebody else's by then.
    """
    import torch

    made = torch.empty(len(values), dtype=torch.int64, device=device)
    for place, value in enumerate(values):
        made[place].fill_(value)
    return made


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@dataclass(frozen=True)
class Bug:
    """A seeded defect.

    id         museum entry, worker and, where there are several, variant: ``TRT-01/PARDWorker/restore-only``
    kind       K1..K14
    worker     the worker that it is hunted in
    title      one sentence: what is wrong
    reference  public pull requests or issues
    caught_by  slugs of invariants that notice it in the smallest scenario that shows it
    apply      seeds it
    """

    id: str
    kind: str
    worker: str
    title: str
    reference: str
    caught_by: tuple[str, ...]
    apply: Callable[[Patch], None]

    @property
    def on_device(self) -> bool:
        """Whether it is hunted on a GPU too: what a graph freezes, what a copy races with, and what both repeat."""
        return self.kind in _DEVICE_KINDS or self.id.split("/")[0] in _DEVICE_ENTRIES


_DEVICE_KINDS: Final = ("K10", "K11")
_DEVICE_ENTRIES: Final = ("TRT-01", "TRT-04", "TRT-12")

BUGS: dict[str, Bug] = {}
"""Every seeded defect by id, in the order of registration."""
_LISTED: Final = "`specfuzz list bugs`"
_MANY: Final = 16
"""More defects of an entry than a person wants to read."""


def bug(
    entry: str,
    *,
    kind: str,
    workers: tuple[str, ...],
    title: str,
    reference: str,
    caught_by: tuple[str, ...],
    variant: str = "",
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register the decorated function as the patch of a museum entry: one seeded defect per worker."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        for worker in workers:
            id = "/".join(filter(None, (entry, worker, variant)))
            if id in BUGS:
                raise ValueError(f"museum: {id} is registered twice; name a variant")
            BUGS[id] = Bug(id, kind, worker, title, reference, caught_by, apply)
        return apply

    return register


def nearest(id: str) -> str:
    """A remedy for an id that no defect has: those of its entry, or else the closest of all."""
    entry, _, rest = id.partition("/")
    own = [known for known in BUGS if known.partition("/")[0].lower() == entry.lower()]
    # All begin alike, so only what follows tells how near they are.
    tails = {known.partition("/")[2].lower(): known for known in own}
    near = difflib.get_close_matches(rest.lower(), tails, n=1, cutoff=0.8)
    if near:
        return f"did you mean {tails[near[0]]!r}?"
    if 0 < len(own) <= _MANY:
        return f"write one of {', '.join(own)}"
    return f"see {_LISTED}" if own else closest(id, BUGS, listed=_LISTED)


def find(id: str) -> Bug:
    """The defect of that id; ``UsageError`` with the closest one if there is none."""
    if id not in BUGS:
        raise UsageError(f"bug: none is called {id!r}; {nearest(id)}")
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
