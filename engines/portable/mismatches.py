"""What differs from what was expected, kept on the device until somebody asks.

Comparing launches kernels and waits for nothing. A place is a number: that of the step, times ``_PLACES``, and where in
the step; the first of all that differ is kept, and how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from engines.kernels import triton_for

ANYTHING: Final = -(2**63)
"""Expected where nothing is."""
_PLACES: Final = 1 << 25
"""Places of a step at most."""
_NONE: Final = 2**63 - 1


class Region(NamedTuple):
    """Where the values of one field of a sub-step are: ``shape`` of them, from ``begin`` on."""

    begin: int
    shape: tuple[int, ...]
    substep: str
    run: int
    field: str


@dataclass(frozen=True)
class Mismatch:
    """The first place that differs: ``index`` within the field's values, by row first.

    step   what ``begin_step`` was given
    count  places that differ since the last reading, this one included
    """

    step: Any
    substep: str
    run: int
    field: str
    index: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        place = "".join(f"[{i}]" for i in self.index)
        more = f", and {self.count - 1} more values that differ" if self.count > 1 else ""
        return f"{self.substep} (run {self.run}) {self.field}{place} is not what it should be{more}"


class Mismatches:
    """Gathers what differs in any number of steps, of any sessions on one device; ``read`` brings it to the host.

    state  int64 [3], device: the first place, how many there are, and the number that stands for no place
    step   int64 [1], device: the first place of the running step
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.state = torch.tensor([_NONE, 0, _NONE], dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps: list[tuple[Any, list[Region]]] = []
        self._misfit: Mismatch | None = None

    def begin_step(self, step: Any) -> None:
        """From now on what is compared belongs to ``step``, whatever that is to the caller."""
        self.step.fill_(len(self._steps) * _PLACES)
        self._steps.append((step, []))

    def add_regions(self, regions: Sequence[Region]) -> None:
        """Places that are compared in the running step."""
        self._steps[-1][1].extend(regions)

    def compare(self, actual: Tensor, expected: Tensor, begin: int) -> None:
        """Compare integers, one-dimensional, with int64 ones; the places are those from ``begin`` on.

        Nothing is compared where ``ANYTHING`` is expected.
        """
        if kernels := triton_for(actual):
            kernels.compare(actual, expected, ANYTHING, self.step, begin, self.state)
            return
        wrong = (actual != expected) & (expected != ANYTHING)
        place = torch.arange(begin, begin + len(actual), device=actual.device) + self.step
        first = torch.where(wrong, place, _NONE).amin() if len(actual) else self.state[2]
        self.state[0].copy_(torch.minimum(self.state[0], first))
        self.state[1].add_(wrong.sum())

    def misfit(self, substep: str, run: int, field: str) -> None:
        """A field of the running step has another form than is expected, which the host sees."""
        if self._misfit is None:
            self._misfit = Mismatch(self._steps[-1][0], substep, run, field, (), 1)

    def read(self) -> Mismatch | None:
        """Wait for the device; the first mismatch since the last reading, None if there is none. Begins anew."""
        first, count, _ = self.state.tolist()
        found = self._misfit
        if count:
            number, place = divmod(first, _PLACES)
            step, regions = self._steps[number]
            # One without values begins where the next one does.
            region = max((r for r in regions if r.begin <= place and prod(r.shape)), key=lambda r: r.begin)
            index = _unravel(place - region.begin, region.shape)
            found = Mismatch(step, region.substep, region.run, region.field, index, count)
        self.state.copy_(torch.tensor([_NONE, 0, _NONE]))
        self._steps, self._misfit = [], None
        return found


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, i = divmod(place, size)
        index.insert(0, i)
    return tuple(index)
