"""Copies between host and device as a device sees them: they run some time after they were queued.

Until then their source must stay as it is (PR #15546, #16088, #14008). Without a device every copy is done at once and
no such mistake shows in any result; so each goes through this module, which remembers the source until the copy has
certainly run: when the host has waited for a step that was launched later. ``LatestReads`` finds out what the copies of
a run would read just then, and a second run, whose copies read that, is the run of a device that is as late as can be.

A copy to the host has arrived when the host has waited for it, and not before: until then its destination holds
``NOT_YET``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engines.portable.graphs import CpuGraph

NOT_YET: Final = -1
"""What the host reads of a step's outputs before it has waited for them."""


@dataclass(frozen=True)
class _Arrival:
    """A copy to the host that may not have run yet."""

    number: int
    destination: Tensor
    content: Tensor


@dataclass(frozen=True)
class _Copy:
    """A queued copy. ``version`` counts writes on the source; None for a tensor that does not count them."""

    number: int
    name: str
    source: Tensor
    version: int | None
    content: Tensor

    @property
    def is_overtaken(self) -> bool:
        """Whether the source was written since. Raw pointers write without being counted, so it is compared too."""
        rewritten = self.version is not None and self.source._version != self.version
        return rewritten or not torch.equal(self.source, self.content)


class HostCopies:
    """Copies of one engine that may not have run yet.

    ``late`` has what copies read that run late, by their numbers; all others read their source when they are queued.
    """

    def __init__(self, late: Mapping[int, Tensor] | None = None) -> None:
        self._late = late or {}
        self._pending: list[_Copy] = []
        self._arriving: list[_Arrival] = []
        self._queued = 0
        self._racing: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Remember the copies that are queued inside."""
        global _watching
        outer, _watching = _watching, self
        try:
            yield
        finally:
            _watching = outer

    def queue(self, name: str, source: Tensor) -> Tensor:
        """A copy is being queued; returns what it reads. What a graph records is no such copy."""
        if source.device.type != "cpu" or CpuGraph.recording:
            return source
        late = self._late.get(self._queued)
        # Out of sight of torch function modes, which count calls of the engine.
        with torch._C.DisableTorchFunction():
            version = None if source.is_inference() else source._version
            self._pending.append(_Copy(self._queued, name, source, version, source.clone()))
        self._queued += 1
        return late if late is not None and late.shape == source.shape else source

    def bring(self, destination: Tensor, source: Tensor) -> None:
        """A copy to a host tensor is being queued."""
        destination.copy_(source)
        with torch._C.DisableTorchFunction():
            self._arriving.append(_Arrival(self._queued, destination, destination.clone()))
            destination.fill_(NOT_YET)
        self._queued += 1

    def record_event(self) -> int:
        """A point behind all copies queued so far."""
        return self._queued

    def synchronize(self, event: int) -> None:
        """The host has waited until the device has passed that point."""
        self._look()
        self._pending = [copy for copy in self._pending if copy.number >= event]
        self._arrive(event)

    def take_racing(self) -> list[str]:
        """Names of the copies whose source was written before they had certainly run; each is told once."""
        self._look()
        racing, self._racing = sorted(self._racing), []
        return racing

    def peek(self, destination: Tensor) -> Tensor:
        """What a host tensor will hold, for who looks on and may not wait in the engine's place."""
        return next((a.content for a in self._arriving if a.destination is destination), destination)

    def _arrive(self, event: int) -> None:
        with torch._C.DisableTorchFunction():
            for arrival in self._arriving:
                if arrival.number < event:
                    arrival.destination.copy_(arrival.content)
        self._arriving = [arrival for arrival in self._arriving if arrival.number >= event]

    def _look(self) -> None:
        with torch._C.DisableTorchFunction():
            overtaken = [copy for copy in self._pending if copy.is_overtaken]
        if overtaken:
            self._racing += [copy.name for copy in overtaken]
            told = {copy.number for copy in overtaken}
            self._pending = [copy for copy in self._pending if copy.number not in told]


class LatestReads(HostCopies):
    """Notes what a copy would read at the last moment, by its number, if its source has been written by then."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}

    def synchronize(self, event: int) -> None:
        """The host has waited until the device has passed that point, and so for copies before it."""
        with torch._C.DisableTorchFunction():
            due = [copy for copy in self._pending if copy.number < event]
            self.read.update((copy.number, copy.source.clone()) for copy in due if copy.is_overtaken)
        self._pending = [copy for copy in self._pending if copy.number >= event]
        self._arrive(event)

    def finish(self) -> dict[int, Tensor]:
        """What was noted, once the host has waited for everything."""
        self.synchronize(self._queued)
        return self.read


_watching: HostCopies | None = None


def copy_to_device(name: str, destination: Tensor, source: Tensor) -> Tensor:
    """Queue the copy of a host tensor to a device tensor, which is returned. ``name`` says which, in a report."""
    if _watching is not None:
        source = _watching.queue(name, source)
    return destination.copy_(source, non_blocking=True)


def to_device(name: str, source: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """A device tensor with what a host tensor holds, once the copy that this queues has run."""
    if _watching is not None:
        source = _watching.queue(name, source)
    return source.to(device, non_blocking=True, copy=copy)


def copy_to_host(destination: Tensor, source: Tensor) -> Tensor:
    """Queue the copy of a device tensor to a host tensor, which is returned: to be read once the host has waited."""
    if _watching is None or source.device.type != "cpu":
        return destination.copy_(source, non_blocking=True)
    _watching.bring(destination, source)
    return destination


def record_event() -> int:
    """See ``HostCopies.record_event``; nothing without one that watches."""
    return 0 if _watching is None else _watching.record_event()


def synchronize(event: int) -> None:
    """See ``HostCopies.synchronize``."""
    if _watching is not None:
        _watching.synchronize(event)
