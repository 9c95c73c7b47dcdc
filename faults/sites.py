"""Names and classes of fault sites.

A site is named after how it is reached: ``draft_model.forward`` (a seam), ``torch.clone`` (a torch function) or
``line:engines/portable/speculative/eagle3.py:120`` (a source line).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from scenarios.errors import ScenarioError

SEAMS: Final = "seams"
TORCH: Final = "torch"
LINES: Final = "lines"
INJECTORS: Final = (SEAMS, TORCH, LINES)
"""Families of fault sites, by how they are reached: wrapped calls, torch functions, source lines."""

_TORCH_PREFIX = "torch."
_LINE_PREFIX = "line:"


class SiteClass(str, Enum):
    """What can go wrong at a site."""

    ALLOC = "alloc"
    """Memory is allocated."""
    LAUNCH = "launch"
    """A kernel or a copy is launched."""
    HOOK = "hook"
    """The worker calls back into the attention metadata."""
    CAPTURE = "capture"
    """A CUDA graph is captured."""
    COLLECTIVE = "collective"
    """Ranks wait for each other."""
    ASYNC = "async"
    """The device is waited for, so that an error of an earlier kernel comes to light."""
    RESTORE = "restore"
    """State is put back; assumed not to fail unless double faults are asked for."""


DEFAULT_CLASSES: Final = frozenset(SiteClass) - {SiteClass.RESTORE}
"""Classes of the sites that are counted and can be made to fail: those that do fail in production."""


@dataclass(frozen=True, eq=False)
class Seam:
    """A named call on an object of the engine.

    site             name of the fault site
    owner, attribute the call is ``owner.attribute(...)``; owner is an instance or a module with a ``__dict__``
    site_class       None: the call is observed only, never a fault site
    before           ``before(args, kwargs)`` is called ahead of the call, and ahead of a fault there
    after            ``after(result, args, kwargs)`` is called once the call has returned
    """

    site: str
    owner: Any
    attribute: str
    site_class: SiteClass | None
    before: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
    after: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None


def family(site: str) -> str:
    """The family of ``INJECTORS`` that reaches ``site``."""
    if site.startswith(_LINE_PREFIX):
        return LINES
    return TORCH if site.startswith(_TORCH_PREFIX) else SEAMS


def line_site(path: str, number: int) -> str:
    """Name of a source line; ``path`` with forward slashes."""
    return f"{_LINE_PREFIX}{path}:{number}"


def parse_line_site(site: str) -> tuple[str, int]:
    """Path and line number of a line site; ``ScenarioError`` when ``site`` names no line."""
    path, _, number = site.removeprefix(_LINE_PREFIX).rpartition(":")
    if family(site) != LINES or not path or not number.isdecimal():
        raise ScenarioError("fault.site", f"{site!r} names no source line", "write line:PATH:NUMBER")
    return path, int(number)


def torch_site(function: str) -> str:
    """Name of a torch function by the ``__name__`` torch gives it: ``add_``, ``__setitem__``, ``add.Tensor``."""
    name = function.partition(".")[0]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return _TORCH_PREFIX + name


_WAITING = "item tolist bool int float index cpu numpy nonzero equal allclose is_nonzero masked_select unique argwhere"


def torch_class(site: str) -> SiteClass:
    """Class of a torch site: what the function does first that can fail on a device."""
    name = site.removeprefix(_TORCH_PREFIX)
    if name in _WAITING.split():
        return SiteClass.ASYNC
    return SiteClass.LAUNCH if name.endswith("_") or name == "setitem" else SiteClass.ALLOC
