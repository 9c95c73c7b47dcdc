"""The tracer model as target and as draft models, called as upstream's are.

They reach the KV cache through the attention metadata alone: lengths, block table and pools. A hidden row is
int64 [2]: the digest that is passed on, and the digest that the head turns into a token.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from engines.compressed_tracer import CompressedTracer
from engines.page_tracer import HostTracer, ViewTracer
from engines.portable.attention.backends.flashinfer import FlashInferAttention
from engines.portable.attention.backends.sparse.deepseek_v4.backend import DeepseekV4TrtllmAttention
from engines.portable.attention.backends.sparse.dsa.backend import DSATrtllmAttention
from engines.portable.attention.backends.trtllm import DRAFT_LAYER, TrtllmAttention
from engines.portable.attention.backends.vanilla import VanillaAttention
from engines.portable.distributed import FusedMoE, all_rank_num_tokens_kept
from engines.portable.heads import LMHead, LogitsProcessor, MarkovHead, SteeredMTPHead, Steering
from engines.portable.mamba_mixer import MambaMixer
from engines.tracer import SparseTracer, Tracer, block_digests, own_terms
from scenarios.tracer import PRIME

HIDDEN_SIZE: Final = 2
NUM_LAYERS: Final = 3
"""Layers of the target whose outputs a drafter may read: 1, 2 and 3 times the digest and the row's own term in it."""

_ATTENTION: Final[dict[type[Tracer], type[Any]]] = {
    CompressedTracer: DeepseekV4TrtllmAttention,
    SparseTracer: DSATrtllmAttention,
    ViewTracer: FlashInferAttention,
    HostTracer: VanillaAttention,
}
"""The attention of the backend that a tracer stands for, if it is another one than TRTLLM."""


class TracerModel(nn.Module):
    """Base of target and drafters: finds its rows in the cache, and attends as the tracer does."""

    def __init__(self, tracer: Tracer, layer_idx: int = DRAFT_LAYER) -> None:
        super().__init__()
        self.attention = _ATTENTION.get(type(tracer), TrtllmAttention)(tracer, layer_idx)


class TargetModel(TracerModel):
    """The target: hidden rows, int64 [rows, 2], both columns the digest. ``mixer``: it has recurrent layers, too."""

    def __init__(self, tracer: Tracer, experts: FusedMoE | None = None, mixer: MambaMixer | None = None) -> None:
        super().__init__(tracer)
        self.experts = experts
        self.mixer = mixer

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, attn_metadata: Any, spec_metadata: Any) -> Tensor:
        """Hidden rows of the tokens ``input_ids`` (int64 [rows]); captures those of layers that a drafter reads."""
        table, rows = self.attention.place(attn_metadata, input_ids.shape[0])
        positions = position_ids.squeeze(0)
        digests = self.attention.target(attn_metadata, table, rows, positions, input_ids)
        if self.mixer is not None:
            digests = self.mixer(attn_metadata, positions, input_ids, digests)
        if self.experts is not None:
            digests = self.experts(digests, attn_metadata.all_rank_num_tokens)
        captured = [layer for layer in range(NUM_LAYERS) if spec_metadata.is_layer_capture(layer)]
        if captured:
            inner = torch.stack([digests, own_terms(rows, positions, input_ids)], dim=1)
            for layer in captured:
                spec_metadata.maybe_capture_hidden_states(layer, inner * (layer + 1) % PRIME)
        return digests.unsqueeze(1).expand(-1, HIDDEN_SIZE)


class ShiftedDraftModel(TracerModel):
    """A drafter that is given, at each position, a later token: with hidden states or without."""

    def _draft(
        self, input_ids: Tensor, position_ids: Tensor, attn_metadata: Any, hidden_states: Tensor | None = None
    ) -> Tensor:
        """Hidden rows: the digest, and what the head chooses from."""
        table, rows = self.attention.place(attn_metadata, input_ids.shape[0])
        digests, own = self.attention.shifted(attn_metadata, table, rows, position_ids, input_ids)
        choices = digests if hidden_states is None else (2 * (hidden_states[:, 0] + own) - digests) % PRIME
        return torch.stack([digests, choices], dim=1)


class Eagle3Layers(ShiftedDraftModel):
    """The layers of an Eagle3 drafter: rows for the head, and hidden states to save.

    They have no experts; the counts that they are given are those of the attention metadata while they run.
    """

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        all_rank_num_tokens: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows, int64 [rows, 2], twice; ``hidden_states`` are the target's or the drafter's own."""
        with all_rank_num_tokens_kept(attn_metadata):
            if all_rank_num_tokens is not None:
                attn_metadata.all_rank_num_tokens = all_rank_num_tokens
            hidden = self._draft(input_ids, position_ids, attn_metadata, hidden_states)
        return hidden, hidden


class MTPEagleLayer(ShiftedDraftModel):
    """The MTP layer of MTP-Eagle, with its head, and experts that take their counts from the attention metadata."""

    def __init__(self, tracer: Tracer, shared_head: nn.Module, experts: FusedMoE | None = None) -> None:
        super().__init__(tracer)
        self.shared_head = shared_head
        self.experts = experts

    def forward(
        self,
        *,
        embed_tokens: Any,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        all_rank_num_tokens: list[int] | None,
    ) -> Tensor:
        """Hidden rows, int64 [rows, 2]; ``all_rank_num_tokens`` holds for this call, None for what the metadata has."""
        with all_rank_num_tokens_kept(attn_metadata):
            if all_rank_num_tokens is not None:
                attn_metadata.all_rank_num_tokens = all_rank_num_tokens
            hidden = self._draft(input_ids, position_ids, attn_metadata, hidden_states)
            return hidden if self.experts is None else self.experts(hidden, attn_metadata.all_rank_num_tokens)


class MTPLayer(ShiftedDraftModel):
    """Layer ``layer`` of vanilla MTP, with its head; it is given the token ``layer + 1`` positions further on."""

    def __init__(self, tracer: Tracer, shared_head: nn.Module, layer: int) -> None:
        super().__init__(tracer, DRAFT_LAYER + layer)
        self.shared_head = shared_head

    def forward(
        self, *, embed_tokens: Any, input_ids: Tensor, position_ids: Tensor, hidden_states: Tensor, attn_metadata: Any
    ) -> Tensor:
        """Hidden rows, int64 [rows, 2], of the tokens so far ahead."""
        return self._draft(input_ids, position_ids, attn_metadata, hidden_states)


class DraftTargetLayers(ShiftedDraftModel):
    """The layers of a separate draft model."""

    def __init__(self, tracer: Tracer, experts: FusedMoE | None = None) -> None:
        super().__init__(tracer)
        self.experts = experts

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, attn_metadata: Any, spec_metadata: Any) -> Tensor:
        """Hidden rows, int64 [rows, 2]; it is told no hidden states."""
        hidden = self._draft(input_ids, position_ids, attn_metadata)
        return hidden if self.experts is None else self.experts(hidden, attn_metadata.all_rank_num_tokens)


class PARDLayers(TracerModel):
    """The layers of a parallel drafter: hidden rows whose masks are seen as what the target would choose."""

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, attn_metadata: Any, spec_metadata: Any) -> Tensor:
        """Hidden rows, int64 [rows, 2]; the last ones of a generation are masks."""
        table, rows = self.attention.place(attn_metadata, input_ids.shape[0])
        masks = spec_metadata.runtime_tokens_per_gen_step - 1 if attn_metadata.num_generations else 0
        digests = self.attention.parallel(attn_metadata, table, rows, position_ids, input_ids, masks)
        return digests.unsqueeze(1).expand(-1, HIDDEN_SIZE)


class DraftModel(nn.Module):
    """A draft model as its worker calls it: ``model`` and ``logits_processor``, or ``mtp_layers``.

    This base has neither, for workers that draft without a model.
    """

    def __init__(self, steering: Steering) -> None:
        super().__init__()
        self.steering = steering
        self.lm_head = LMHead()


class Eagle3DraftModel(DraftModel):
    """Eagle3: ``apply_eagle3_fc``, ``model``, ``logits_processor``."""

    def __init__(self, tracer: Tracer, steering: Steering, head: nn.Module) -> None:
        super().__init__(steering)
        self.model = Eagle3Layers(tracer)
        self.model.register_buffer("d2t", steering.d2t)
        self.logits_processor = head

    def apply_eagle3_fc(self, hidden_states: Tensor) -> Tensor:
        """Project what was captured of three layers, [rows, 3 * HIDDEN_SIZE], to one hidden row."""
        _, second, third = hidden_states.split(HIDDEN_SIZE, dim=1)
        return (third - second) % PRIME


class MTPEagleDraftModel(DraftModel):
    """MTP-Eagle: ``mtp_layers[0]`` with its ``shared_head``, and ``embed_tokens``."""

    def __init__(self, tracer: Tracer, steering: Steering, head: nn.Module, experts: FusedMoE | None = None) -> None:
        super().__init__(steering)
        self.embed_tokens = None
        self.mtp_layers = nn.ModuleList([MTPEagleLayer(tracer, head, experts)])


class MTPDraftModel(DraftModel):
    """Vanilla MTP: ``num_layers`` of ``mtp_layers``, each with a ``shared_head``, and ``embed_tokens``."""

    def __init__(self, tracer: Tracer, steering: Steering, num_layers: int) -> None:
        super().__init__(steering)
        self.embed_tokens = None
        self.mtp_layers = nn.ModuleList(MTPLayer(tracer, SteeredMTPHead(steering), i) for i in range(num_layers))


class DraftTargetDraftModel(DraftModel):
    """DraftTarget: ``model``, ``logits_processor``."""

    def __init__(self, tracer: Tracer, steering: Steering, head: nn.Module, experts: FusedMoE | None = None) -> None:
        super().__init__(steering)
        self.model = DraftTargetLayers(tracer, experts)
        self.model.register_buffer("d2t", steering.d2t)
        self.logits_processor = head


class PARDDraftModel(DraftModel):
    """PARD: ``model``, ``logits_processor``."""

    def __init__(self, tracer: Tracer, steering: Steering, head: nn.Module) -> None:
        super().__init__(steering)
        self.model = PARDLayers(tracer)
        self.model.register_buffer("d2t", steering.d2t)
        self.logits_processor = head


class DFlashDraftModel(DraftModel):
    """DFlash: columns from what was captured of the target, and one forward over blocks of queries.

    The row of a block predicts the token at its own position.
    """

    def __init__(self, tracer: Tracer, steering: Steering, head: nn.Module) -> None:
        super().__init__(steering)
        # A token is its own embedding, so that there are no layers to call; but workers look for d2t there.
        self.model = nn.Module()
        self.model.register_buffer("d2t", steering.d2t)
        self.logits_processor = head

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        """Project what was captured of three layers, [rows, 3 * HIDDEN_SIZE], to each row's own term: [rows]."""
        _, second, third = hidden_states.split(HIDDEN_SIZE, dim=1)
        return (third - second)[:, 1] % PRIME

    def precompute_context_kv(self, projected: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of columns, int64 [rows] each: a key is a position, as rotation would have it."""
        return positions.long(), projected

    def dflash_forward(
        self,
        *,
        noise_embedding: Tensor,
        query_positions: Tensor,
        num_ctx_per_req: Tensor,
        ctx_k_cache: Tensor,
        ctx_v_cache: Tensor,
        ctx_cache_batch_idx: Tensor,
    ) -> Tensor:
        """Hidden rows of all blocks, [G * block, HIDDEN_SIZE].

        noise_embedding, query_positions  int [G, block]; an embedding is the token itself
        num_ctx_per_req                   int64 [G]: columns of each context
        ctx_k_cache, ctx_v_cache          int64 [slots, columns]
        ctx_cache_batch_idx               int64 [G]: slot of each context
        """
        keys, values = (cache.index_select(0, ctx_cache_batch_idx) for cache in (ctx_k_cache, ctx_v_cache))
        digests = block_digests(keys, values, num_ctx_per_req, query_positions, noise_embedding)
        return self._predicting(digests).reshape(-1, 1).expand(-1, HIDDEN_SIZE)

    def _predicting(self, digests: Tensor) -> Tensor:
        """Which of the digests before, between and behind the rows of a block are those of its rows."""
        return digests[:, :-1]


class DSparkDraftModel(DFlashDraftModel):
    """DSpark: each row predicts the token after its own, and the head's choice is corrected by ``markov_head``."""

    def __init__(self, tracer: Tracer, steering: Steering, head: nn.Module) -> None:
        super().__init__(tracer, steering, head)
        self.markov_head = MarkovHead(steering)

    def _predicting(self, digests: Tensor) -> Tensor:
        return digests[:, 1:]


class SpecDecOneEngineForCausalLM(nn.Module):
    """Target, drafter and worker as one model: one forward verifies and drafts."""

    def __init__(
        self,
        tracer: Tracer,
        draft_model: DraftModel,
        spec_worker: nn.Module,
        experts: FusedMoE | None = None,
        *,
        second_choice: bool = False,
        probabilities: bool = False,
        recurrent: bool = False,
    ) -> None:
        super().__init__()
        self.model = TargetModel(tracer, experts, MambaMixer() if recurrent else None)
        self.lm_head = LMHead()
        self.logits_processor = LogitsProcessor(second_choice, probabilities)
        self.draft_model = draft_model
        self.spec_worker = spec_worker

    def forward(
        self, *, input_ids: Tensor, position_ids: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> dict[str, Tensor]:
        """Run the target, then the worker; returns the worker's outputs."""
        self.draft_model.steering.depth = 0
        common = {"attn_metadata": attn_metadata, "spec_metadata": spec_metadata}
        hidden_states = self.model(input_ids=input_ids, position_ids=position_ids, **common)
        rows = hidden_states.index_select(0, spec_metadata.gather_ids)
        logits = self.logits_processor(rows, self.lm_head, attn_metadata, True)
        outputs: dict[str, Tensor] = self.spec_worker(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            logits=logits,
            draft_model=self.draft_model,
            **common,
        )
        return outputs
