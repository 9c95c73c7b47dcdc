"""Draft models with the surface that upstream's workers ask for, where the portable engine's have a plainer one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from engines.portable import models
from engines.portable.heads import SteeredTreeLogitsProcessor, Steering
from engines.portable.models import DraftModel
from engines.portable.speculative import utils
from engines.portable.speculative.drafter import Setting
from engines.tensorrt_llm.trees import probability_logits
from engines.tracer import Tracer

DFLASH_BACKEND: Final = "VANILLA"
"""Upstream's attention backend of DFlash whose context is dense and that needs no compiled operators."""


class DFlashDraftModel(models.DFlashDraftModel):
    """The drafter of DFlash as a model of one layer with one head, whose keys and values are a single number each.

    ``fc`` says the dtype of the context and, with ``hidden_norm``, that there is one; an embedding is the token.
    """

    dflash_attention_backend = DFLASH_BACKEND
    hidden_norm = None
    _num_attn_layers = _num_heads = _num_kv_heads = _head_dim = 1

    def __init__(self, tracer: Tracer, steering: Steering, head: nn.Module) -> None:
        super().__init__(tracer, steering, head)
        self.fc = SimpleNamespace(weight=torch.zeros(0, dtype=torch.int64))
        self.draft_model_full = SimpleNamespace(model=SimpleNamespace(embed_tokens=lambda ids: ids.unsqueeze(1)))

    def _build_fused_kv_buffers(self) -> None:
        """Nothing is fused."""

    def precompute_context_kv(self, projected: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of columns, int64 [rows, layers, heads, 1] each, new ones: the caller masks them."""
        keys, values = super().precompute_context_kv(projected, positions)
        return keys.clone().view(-1, 1, 1, 1), values.clone().view(-1, 1, 1, 1)

    def dflash_forward(
        self, *, noise_embedding: Tensor, ctx_k_cache: Tensor, ctx_v_cache: Tensor, **rest: Any
    ) -> Tensor:
        """Hidden rows of all blocks, [G * block, HIDDEN_SIZE].

        noise_embedding           int64 [G, block, 1]
        ctx_k_cache, ctx_v_cache  int64 [slots, layers, columns, heads, 1]
        rest                      as in the portable engine, and the pages of a context that has some: None here
        """
        pages = rest.pop("ctx_kv_cache", None), rest.pop("ctx_page_table", None)
        assert pages == (None, None), "the context is dense"
        return super().dflash_forward(
            noise_embedding=noise_embedding.squeeze(2),
            ctx_k_cache=ctx_k_cache[:, 0, :, 0, 0],
            ctx_v_cache=ctx_v_cache[:, 0, :, 0, 0],
            **rest,
        )


class TreeHead(SteeredTreeLogitsProcessor):
    """The steered head of trees, for a worker that takes the softmax of its logits and multiplies."""

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Logits, float64, whose softmax has a probability for each score."""
        return probability_logits(super().forward(hidden_states, lm_head, attn_metadata))


class MTPEagleTreeLayer(models.MTPEagleLayer):
    """The MTP layer, which trees of drafts do not show the metadata of speculation."""

    def forward(self, **inputs: Any) -> Tensor:
        """Hidden rows as ever; ``spec_metadata`` is None unless somebody gives it."""
        return super().forward(**{"spec_metadata": None, **inputs})


class MTPEagleTreeDraftModel(DraftModel):
    """MTP-Eagle with trees: ``mtp_layers[0]`` with its ``shared_head``, and ``embed_tokens``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.steering)
        self.embed_tokens = None
        head = TreeHead(setting.steering, setting.spec_config)
        self.mtp_layers = nn.ModuleList([MTPEagleTreeLayer(setting.tracer, head)])


def get_draft_model(setting: Setting) -> DraftModel:
    """The draft model that upstream's worker of the mode calls."""
    if setting.spec_config.spec_dec_mode.is_dflash():
        return DFlashDraftModel(setting.tracer, setting.steering, setting.head(parallel=True))
    if setting.spec_config.use_dynamic_tree:
        return MTPEagleTreeDraftModel(setting)
    return utils.get_draft_model(setting)
