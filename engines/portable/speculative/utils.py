"""Which classes belong to a mode."""

from __future__ import annotations

from typing import Any

import torch

from engines.portable.models import HIDDEN_SIZE, NUM_LAYERS
from engines.portable.speculative.draft_target import DraftTargetOneModelSpecMetadata, DraftTargetOneModelWorker
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
}
"""Mode of each worker, by the worker's class name."""


def get_spec_metadata(
    spec_config: DecodingConfig, max_num_requests: int, max_num_tokens: int, device: torch.device
) -> SpecMetadata:
    """The metadata that the mode's worker works on."""
    mode = spec_config.spec_dec_mode
    if mode is SpeculativeDecodingMode.PARD:
        return PARDSpecMetadata(max_num_requests=max_num_requests, max_num_tokens=max_num_tokens, device=device)
    if mode is SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL:
        return DraftTargetOneModelSpecMetadata(
            max_num_requests=max_num_requests, max_num_tokens=max_num_tokens, device=device
        )
    return Eagle3OneModelSpecMetadata(
        max_num_requests=max_num_requests,
        max_num_tokens=max_num_tokens,
        device=device,
        hidden_size=HIDDEN_SIZE,
        layers_to_capture=() if mode.is_mtp_eagle_one_model() else tuple(range(NUM_LAYERS)),
    )


def get_spec_worker(spec_config: DecodingConfig) -> SpecWorkerBase:
    """The worker of the mode."""
    workers: dict[SpeculativeDecodingMode, type[Any]] = {
        SpeculativeDecodingMode.EAGLE3_ONE_MODEL: Eagle3OneModelWorker,
        SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: MTPEagleWorker,
        SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL: DraftTargetOneModelWorker,
        SpeculativeDecodingMode.PARD: PARDWorker,
    }
    worker: SpecWorkerBase = workers[spec_config.spec_dec_mode](spec_config)
    return worker
