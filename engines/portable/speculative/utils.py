"""Which classes belong to a mode, as the modules of this package say."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Final

import engines.portable.speculative as package
from engines.portable.models import DraftModel
from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.portable.speculative.drafter import Drafter, Setting
from engines.portable.speculative.interface import SpecMetadata, SpecWorkerBase
from scenarios import WORKERS

_MODULES = [import_module(f"{package.__name__}.{m.name}") for m in iter_modules(package.__path__) if m.name != "utils"]

_FOUND = {drafter.name: drafter for module in _MODULES for drafter in getattr(module, "DRAFTERS", ())}

DRAFTERS: Final[dict[str, Drafter]] = {name: _FOUND[name] for name in WORKERS if name in _FOUND}
"""Drafters by the worker's class name, in the vocabulary's order."""
MODES: Final = {name: drafter.mode for name, drafter in DRAFTERS.items()}
"""Mode of each worker, by the worker's class name. Whether drafts are a tree is no matter of the mode."""

_BY_MODE: Final = {(drafter.mode, drafter.use_dynamic_tree): drafter for drafter in DRAFTERS.values()}


def _drafter(setting: Setting) -> Drafter:
    return _BY_MODE[setting.spec_config.spec_dec_mode, setting.spec_config.use_dynamic_tree]


def get_spec_resource_manager(setting: Setting) -> SpecResourceManager | None:
    """The manager of what the mode's worker keeps per request; None if it keeps nothing."""
    make = _drafter(setting).resource_manager
    return make(setting) if make is not None else None


def get_spec_metadata(setting: Setting, spec_resource_manager: Any = None) -> SpecMetadata:
    """The metadata that the mode's worker works on."""
    return _drafter(setting).spec_metadata(setting, spec_resource_manager)


def get_spec_worker(setting: Setting) -> SpecWorkerBase:
    """The worker of the mode."""
    worker = _drafter(setting).worker(setting)
    worker.set_force_num_accepted_tokens(setting.spec_config.force_num_accepted_tokens, setting.device)
    return worker


def get_draft_model(setting: Setting) -> DraftModel:
    """The draft model that the mode's worker calls."""
    return _drafter(setting).draft_model(setting)
