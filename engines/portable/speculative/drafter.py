"""What the engine makes for a worker, so that a worker is added in one file.

A module of this package that has workers lists them in ``DRAFTERS``, a tuple of ``Drafter``; ``utils`` finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engines.portable.distributed import Distributed, FusedMoE
from engines.portable.heads import SteeredLogitsProcessor, Steering
from engines.portable.models import HIDDEN_SIZE, NUM_LAYERS, DraftModel
from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.interface import SpecMetadata, SpecWorkerBase
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.tracer import Tracer


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The engine around a worker: its configuration, its sizes, and the tracer that its draft model is made of.

    num_slots  requests that run at a time at most
    """

    spec_config: DecodingConfig
    max_num_requests: int
    max_num_tokens: int
    max_seq_len: int
    num_slots: int
    tracer: Tracer
    steering: Steering
    device: torch.device
    dist: Distributed = field(default_factory=Distributed)

    @property
    def sizes(self) -> dict[str, Any]:
        """What each ``SpecMetadata`` is given."""
        names = ("max_num_requests", "max_num_tokens", "device")
        config = self.spec_config
        return {
            **{name: getattr(self, name) for name in names},
            "spec_dec_mode": config.spec_dec_mode,
            "max_total_draft_tokens": config.max_total_draft_tokens,
        }

    @property
    def draft_experts(self) -> FusedMoE:
        """Experts of a drafter that has some."""
        return FusedMoE(self.dist, "draft_model.moe")

    @property
    def capture(self) -> dict[str, Any]:
        """What metadata is given that captures the hidden states of all layers of the target."""
        return {"hidden_size": HIDDEN_SIZE, "layers_to_capture": tuple(range(NUM_LAYERS))}

    def head(self, *, parallel: bool = False) -> SteeredLogitsProcessor:
        """A draft head whose agreement with the target is steered; ``parallel``: for all drafts of a row at once."""
        return SteeredLogitsProcessor(self.steering, parallel=parallel)


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A worker and what belongs to it.

    name              class name of the worker, as in ``scenarios.WORKERS``
    mode              how upstream calls it
    worker            makes the worker
    spec_metadata     makes its metadata, given the resource manager too
    draft_model       makes the draft model that the worker calls
    resource_manager  makes the manager of what it keeps per request; None if it keeps nothing
    """

    name: str
    mode: SpeculativeDecodingMode
    worker: Callable[[Setting], SpecWorkerBase]
    spec_metadata: Callable[[Setting, Any], SpecMetadata]
    draft_model: Callable[[Setting], DraftModel]
    resource_manager: Callable[[Setting], SpecResourceManager | None] | None = None
    use_dynamic_tree: bool = False
