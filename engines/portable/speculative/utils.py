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
from engines.portable.speculative.sa_enhancer import SADraftEnhancer
from engines.portable.speculative.sa_worker import get_sa_manager
from engines.portable.speculative.shared_kv import shared_kv_draft_model
from engines.portable.speculative.suffix_automaton import sa_manager_of
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
    """The manager of what the mode's worker keeps per request; None if it keeps nothing.

    Suffix automata beside a draft model are managed beside that; where there is nothing else, they are all of it.
    """
    make = _drafter(setting).resource_manager
    manager = make(setting) if make is not None else None
    if not setting.spec_config.sa_threshold:
        return manager
    automata = get_sa_manager(setting)
    if manager is None:
        return automata
    manager.sa_manager = automata
    return manager


def get_spec_metadata(setting: Setting, spec_resource_manager: Any = None) -> SpecMetadata:
    """The metadata that the mode's worker works on."""
    metadata = _drafter(setting).spec_metadata(setting, spec_resource_manager)
    metadata.sa_manager = sa_manager_of(spec_resource_manager)
    return metadata


def get_spec_worker(setting: Setting) -> SpecWorkerBase:
    """The worker of the mode, with an enhancer where suffix automata are beside its draft model."""
    worker, spec_config = _drafter(setting).worker(setting), setting.spec_config
    worker.set_force_num_accepted_tokens(spec_config.force_num_accepted_tokens, setting.device)
    if spec_config.sa_threshold:
        worker.sa_enhancer = SADraftEnhancer(
            spec_config.sa_threshold, setting.max_num_requests, spec_config.max_draft_len, setting.device
        )
    return worker


def get_draft_model(setting: Setting) -> DraftModel:
    """The draft model that the mode's worker calls."""
    if setting.spec_config.use_shared_kv_cache:
        return shared_kv_draft_model(setting)
    return _drafter(setting).draft_model(setting)
