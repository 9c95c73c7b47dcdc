"""The one-model speculative workers. A worker is one module of this package with a ``WORKER`` in it."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from reference.workers.interface import DraftCall, Drafting, Fields, SpecWorker

__all__ = ["WORKERS", "DraftCall", "Drafting", "Fields", "SpecWorker"]

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]

WORKERS: Final[dict[str, SpecWorker]] = {
    worker.name: worker for module in _MODULES if (worker := getattr(module, "WORKER", None)) is not None
}
"""Workers by upstream's class name."""
