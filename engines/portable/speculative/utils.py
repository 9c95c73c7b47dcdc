"""Which classes belong to a mode."""

from __future__ import annotations

from typing import Any

import torch

from engines.portable.models import HIDDEN_SIZE, NUM_LAYERS, Steering
from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.speculative.dflash import DFlashSpecMetadata, DFlashWorker
from engines.portable.speculative.draft_target import DraftTargetOneModelSpecMetadata, DraftTargetOneModelWorker
from engines.portable.speculative.dspark import DSparkWorker
from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata, Eagle3OneModelWorker
from engines.portable.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker
from engines.portable.speculative.interface import (
    DecodingConfig,
    SpecMetadata,
    SpecWorkerBase,
)
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.mtp import MTPEagleWorker, MTPHiddenStatesManager, MTPSpecMetadata, MTPWorker
from engines.portable.speculative.mtp_dynamic_tree import MTPEagleDynamicTreeWorker
from engines.portable.speculative.pard import PARDSpecMetadata, PARDWorker
from engines.portable.speculative.sa_worker import SASpecMetadata, SAWorker
from engines.portable.speculative.spec_tree_manager import SpecTreeManager
from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager
from engines.tracer import Tracer

MODES = {
    "Eagle3OneModelWorker": SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
    "MTPEagleWorker": SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
    "DraftTargetOneModelWorker": SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL,
    "PARDWorker": SpeculativeDecodingMode.PARD,
    "MTPWorker": SpeculativeDecodingMode.MTP,
    "SAWorker": SpeculativeDecodingMode.SA,
    "DFlashWorker": SpeculativeDecodingMode.DFLASH,
    "DSparkWorker": SpeculativeDecodingMode.DSPARK,
    "Eagle3OneModelDynamicTreeWorker": SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
    "MTPEagleDynamicTreeWorker": SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
}
"""Mode of each worker, by the worker's class name. Whether drafts are a tree is no matter of the mode."""


def get_spec_resource_manager(
    spec_config: DecodingConfig,
    *,
    num_slots: int,
    max_num_requests: int,
    max_seq_len: int,
    tracer: Tracer,
    steering: Steering,
    device: torch.device,
) -> SpecResourceManager | None:
    """The manager of what the mode's worker keeps per request; None if it keeps nothing.

    ``num_slots`` requests run at a time at most.
    """
    mode, max_draft_len = spec_config.spec_dec_mode, spec_config.max_draft_len
    if spec_config.use_dynamic_tree:
        return SpecTreeManager(num_slots, 1 + spec_config.max_total_draft_tokens, max_num_requests, device)
    if mode.is_mtp_vanilla():
        return MTPHiddenStatesManager(max_draft_len, HIDDEN_SIZE, num_slots, device)
    if mode.is_sa():
        return SuffixAutomatonManager(tracer, steering, max_draft_len, num_slots, max_num_requests, max_seq_len, device)
    return SeqSlotManager(num_slots) if spec_config.keeps_context else None


def get_spec_metadata(
    spec_config: DecodingConfig,
    max_num_requests: int,
    max_num_tokens: int,
    device: torch.device,
    spec_resource_manager: Any = None,
) -> SpecMetadata:
    """The metadata that the mode's worker works on."""
    mode = spec_config.spec_dec_mode
    common: dict[str, Any] = {
        "max_num_requests": max_num_requests,
        "max_num_tokens": max_num_tokens,
        "device": device,
    }
    if mode is SpeculativeDecodingMode.PARD:
        return PARDSpecMetadata(**common)
    if mode is SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL:
        return DraftTargetOneModelSpecMetadata(**common)
    if mode.is_mtp_vanilla():
        return MTPSpecMetadata(**common, mtp_hidden_states_manager=spec_resource_manager)
    if mode.is_sa():
        return SASpecMetadata(**common, sa_manager=spec_resource_manager)
    layers = () if mode.is_mtp_eagle_one_model() else tuple(range(NUM_LAYERS))
    capture: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "layers_to_capture": layers}
    if spec_config.keeps_context:
        return DFlashSpecMetadata(**common, **capture, seq_slot_manager=spec_resource_manager)
    return Eagle3OneModelSpecMetadata(**common, **capture, spec_resource_manager=spec_resource_manager)


def get_spec_worker(
    spec_config: DecodingConfig, *, num_slots: int, max_seq_len: int, device: torch.device
) -> SpecWorkerBase:
    """The worker of the mode, with room for the contexts of ``num_slots`` requests if it keeps any."""
    workers: dict[SpeculativeDecodingMode, type[Any]] = {
        SpeculativeDecodingMode.EAGLE3_ONE_MODEL: Eagle3OneModelWorker,
        SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: MTPEagleWorker,
        SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL: DraftTargetOneModelWorker,
        SpeculativeDecodingMode.PARD: PARDWorker,
        SpeculativeDecodingMode.MTP: MTPWorker,
        SpeculativeDecodingMode.SA: SAWorker,
        SpeculativeDecodingMode.DFLASH: DFlashWorker,
        SpeculativeDecodingMode.DSPARK: DSparkWorker,
    }
    if spec_config.use_dynamic_tree:
        workers = {
            SpeculativeDecodingMode.EAGLE3_ONE_MODEL: Eagle3OneModelDynamicTreeWorker,
            SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: MTPEagleDynamicTreeWorker,
        }
    room = {"num_slots": num_slots, "max_seq_len": max_seq_len, "device": device}
    mode = spec_config.spec_dec_mode
    worker: SpecWorkerBase = workers[mode](spec_config, **(room if spec_config.keeps_context else {}))
    return worker
