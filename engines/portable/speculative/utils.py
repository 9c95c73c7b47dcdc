"""Which classes belong to a mode."""

from __future__ import annotations

from typing import Any

import torch

from engines.portable.models import HIDDEN_SIZE, NUM_LAYERS
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from engines.portable.speculative.dflash import DFlashSpecMetadata, DFlashWorker
from engines.portable.speculative.draft_target import DraftTargetOneModelSpecMetadata, DraftTargetOneModelWorker
from engines.portable.speculative.dspark import DSparkWorker
from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata, Eagle3OneModelWorker
from engines.portable.speculative.interface import (
    DecodingConfig,
    SpecMetadata,
    SpeculativeDecodingMode,
    SpecWorkerBase,
)
from engines.portable.speculative.mtp import MTPEagleWorker
from engines.portable.speculative.pard import PARDSpecMetadata, PARDWorker

MODES = {
    "Eagle3OneModelWorker": SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
    "MTPEagleWorker": SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
    "DraftTargetOneModelWorker": SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL,
    "PARDWorker": SpeculativeDecodingMode.PARD,
    "DFlashWorker": SpeculativeDecodingMode.DFLASH,
    "DSparkWorker": SpeculativeDecodingMode.DSPARK,
}
"""Mode of each worker, by the worker's class name."""


def get_spec_resource_manager(spec_config: DecodingConfig, *, num_slots: int) -> SeqSlotManager | None:
    """What the mode keeps per request beside its KV; ``num_slots`` requests run at a time at most."""
    return SeqSlotManager(num_slots) if spec_config.spec_dec_mode.keeps_context() else None


def get_spec_metadata(
    spec_config: DecodingConfig,
    max_num_requests: int,
    max_num_tokens: int,
    device: torch.device,
    spec_resource_manager: SeqSlotManager | None = None,
) -> SpecMetadata:
    """The metadata that the mode's worker works on."""
    mode = spec_config.spec_dec_mode
    sizes: dict[str, Any] = {
        "max_num_requests": max_num_requests, "max_num_tokens": max_num_tokens, "device": device
    }  # fmt: skip
    if mode is SpeculativeDecodingMode.PARD:
        return PARDSpecMetadata(**sizes)
    if mode is SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL:
        return DraftTargetOneModelSpecMetadata(**sizes)
    layers = () if mode.is_mtp_eagle_one_model() else tuple(range(NUM_LAYERS))
    capture: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "layers_to_capture": layers}
    if spec_resource_manager is not None:
        return DFlashSpecMetadata(**sizes, **capture, seq_slot_manager=spec_resource_manager)
    return Eagle3OneModelSpecMetadata(**sizes, **capture)


def get_spec_worker(
    spec_config: DecodingConfig, *, num_slots: int, max_seq_len: int, device: torch.device
) -> SpecWorkerBase:
    """The worker of the mode, with room for the contexts of ``num_slots`` requests if it keeps any."""
    workers: dict[SpeculativeDecodingMode, type[Any]] = {
        SpeculativeDecodingMode.EAGLE3_ONE_MODEL: Eagle3OneModelWorker,
        SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: MTPEagleWorker,
        SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL: DraftTargetOneModelWorker,
        SpeculativeDecodingMode.PARD: PARDWorker,
        SpeculativeDecodingMode.DFLASH: DFlashWorker,
        SpeculativeDecodingMode.DSPARK: DSparkWorker,
    }
    room = {"num_slots": num_slots, "max_seq_len": max_seq_len, "device": device}
    mode = spec_config.spec_dec_mode
    worker: SpecWorkerBase = workers[mode](spec_config, **(room if mode.keeps_context() else {}))
    return worker
