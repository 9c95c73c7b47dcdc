"""Faults: where, when and how a step fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from hypothesis import strategies as st

from scenarios import Fault, FaultKind, Phase, UsageError
from strategies.choices import Draw, choose, in_range, pick

Kinds: TypeAlias = Mapping[Phase, Sequence[FaultKind]]
"""What may be raised in each phase; a kind listed twice is twice as likely."""

_SERVED: Final = (*(FaultKind.ERROR, FaultKind.OOM) * 7, FaultKind.CUDA)

KINDS: Final[Kinds] = {
    Phase.WARMUP: (*(FaultKind.OOM,) * 6, FaultKind.ERROR, FaultKind.CUDA),
    Phase.CAPTURE: (FaultKind.OOM, FaultKind.ERROR, FaultKind.CUDA),
    Phase.EAGER: _SERVED,
    Phase.REPLAY: _SERVED,
}
"""Mostly kinds after which the run goes on."""

_TOGETHER: Final = "allgather"
"""In the names of sites that only several ranks pass, and all of them together."""
_TIMES: Final = (2, 6)
"""How often a site that is passed again is listed once more: any, and one of several ranks."""


def faults(sites: Mapping[str, int], *, kinds: Sequence[FaultKind] = KINDS[Phase.EAGER]) -> st.SearchStrategy[Fault]:
    """A fault at one of the ``sites`` of a step.

        faults({"draft_model.forward": 3}, kinds=KINDS[Phase.WARMUP])

    sites  site -> how often the step passes it, as recorded; first the site is drawn, then the occurrence, so
           that a site passed twice is as likely as one passed a hundred times. One that is passed again is more
           likely than others, mostly at another occurrence than the first; most of all one of several ranks
    kinds  what may be raised; a kind listed twice is twice as likely

    Shrinks to the first occurrence of the first site and the first kind. Raises ``UsageError`` if there is no
    site, no kind, or a site with less than one occurrence.
    """
    if not sites:
        raise UsageError("faults(): sites is empty; record a clean run of the step first")
    for site, occurrences in sites.items():
        in_range("faults", f"sites[{site!r}]", occurrences, 1)
    if not kinds:
        raise UsageError("faults(): kinds is empty; write one or more of the members of FaultKind")
    return _faults(dict(sites), tuple(kinds))


@st.composite
def _faults(draw: st.DrawFn, sites: Mapping[str, int], kinds: Sequence[FaultKind]) -> Fault:
    return draw_fault(draw, sites, kinds)


def draw_fault(draw: Draw, sites: Mapping[str, int], kinds: Sequence[FaultKind]) -> Fault:
    """A fault as in ``faults``, with the ``draw`` of a composite strategy."""
    # More of those that are passed again: what the first round of a loop has changed is still so in its middle. By
    # number, as a step with a short loop has few such sites, and half of its faults would strike at these.
    again = tuple(site for site in sites if sites[site] > 1 for _ in range(_TIMES[_TOGETHER in site]))
    choice = pick(draw, len(sites) + len(again))
    site = (*sites, *again)[choice]
    # One draw either way: otherwise one of both would be the simpler fault.
    drawn = pick(draw, sites[site])
    occurrence = 1 + drawn if choice < len(sites) else sites[site] - drawn % (sites[site] - 1)
    return Fault(site=site, occurrence=occurrence, kind=choose(draw, kinds))
