"""Fault sites: named places of the code under test that are counted in one run and made to fail in the next.

Three injectors share one interface, ``Sites``: wrapped calls (*seams*), torch functions and source lines.
Nothing is global: a ``Sites`` object belongs to one session and leaves no trace after ``close()``.
"""

from faults.bracket import Bracket
from faults.injected import InjectedFault, is_injected, raised_at
from faults.seams import HarnessError, Sites
from faults.sites import (
    DEFAULT_CLASSES,
    INJECTORS,
    LINES,
    SEAMS,
    TORCH,
    Seam,
    SiteClass,
    family,
    line_site,
    parse_line_site,
    torch_class,
    torch_site,
)

__all__ = [
    "DEFAULT_CLASSES",
    "INJECTORS",
    "LINES",
    "SEAMS",
    "TORCH",
    "Bracket",
    "HarnessError",
    "InjectedFault",
    "Seam",
    "SiteClass",
    "Sites",
    "family",
    "is_injected",
    "line_site",
    "parse_line_site",
    "raised_at",
    "torch_class",
    "torch_site",
]
