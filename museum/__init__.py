"""Seeded defects: real bugs put back into the portable engine, to show that the suite finds them.

One module per entry of the bug museum, ``trt_01`` for TRT-01; all of them are found by their place in this folder.
They import torch and the engine only when a defect is seeded, so that listing them needs neither.
"""

from importlib import import_module
from pkgutil import iter_modules

from museum.bug import BUGS, Bug, Patch, bug, find, nearest, seeded

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["BUGS", "Bug", "Patch", "bug", "find", "nearest", "seeded"]
