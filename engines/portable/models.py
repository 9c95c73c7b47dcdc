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
from engines.portable.mamba_mixer import MambaMixer
from engines.portable.speculative.config import DecodingConfig
from engines.row_tracer import digests_of, with_digests
from engines.tracer import (
    SparseTracer,
    Tracer,
    block_digests,
    choose,
    disagree,
    log_probabilities,
    near,
    one_hot,
    own_terms,
    two_choices,
)
from scenarios.tracer import PRIME, VOCAB_SIZE, d2t

HIDDEN_SIZE: Final = 2
NUM_LAYERS: Final = 3
"""Layers of the target whose outputs a drafter may read: 1, 2 and 3 times the digest and the row's own term in it."""


class LMHead(nn.Module):
    """Turns the second column of hidden rows into tokens: int64 [rows]."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The second column as tokens."""
        return choose(hidden_states[:, 1])


class LogitsProcessor(nn.Module):
    """Logits of hidden rows: float32 [rows, VOCAB_SIZE]; of a first choice alone, or of a second one too.

    With ``probabilities`` they say more than what is chosen, as rejection sampling asks for: what it is chosen from.
    """

    def __init__(self, second_choice: bool = False, probabilities: bool = False) -> None:
        super().__init__()
        self._logits = two_choices if second_choice else one_hot
        self._probabilities = probabilities

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Logits of what ``lm_head`` makes of the rows. No context logits are asked for."""
        logits = self._logits(lm_head(hidden_states))
        return with_digests(logits, hidden_states[:, 1]) if self._probabilities else logits


class Steering:
    """Makes a drafter as good as a scenario wants it: which of a row's drafts the target will agree with.

    agree     int64 [max_num_requests], device: so many, from the first on, per row
    near      the same: to so many drafts, counted from the first on too, the target at least comes close
    depth     draft steps done in this forward
    sa_agree  as ``agree``, of the rows whose texts suffix automata extend
    sa_match  int64 [max_num_requests], device: length of the match in each of these texts
    probabilities  whether heads also say what they choose from, for rejection sampling
    d2t       int64 [VOCAB_SIZE], device: what is to be added to the head's token to have the target's; None when they
        speak the same vocabulary
    """

    def __init__(
        self,
        max_num_requests: int,
        device: torch.device,
        *,
        draft_vocab_map: bool = False,
        second_choice: bool = False,
        probabilities: bool = False,
    ) -> None:
        self.probabilities = probabilities
        self.agree, self.sa_agree, self.sa_match = torch.zeros(3, max_num_requests, dtype=torch.int64, device=device)
        self.near = torch.zeros_like(self.agree)
        self._logits = two_choices if second_choice else one_hot
        self.depth = 0
        self.d2t = torch.tensor([d2t(i) for i in range(VOCAB_SIZE)], device=device) if draft_vocab_map else None
        self._token_of = None if self.d2t is None else self.d2t + torch.arange(VOCAB_SIZE, device=device)

    def in_draft_vocab(self, logits: Tensor) -> Tensor:
        """Logits of the target's tokens, [rows, VOCAB_SIZE], as the draft head has them."""
        return logits if self._token_of is None else logits.index_select(1, self._token_of)

    def logits(self, tokens: Tensor, digests: Tensor | None) -> Tensor:
        """Logits of a draft head that chooses ``tokens`` (int64 [rows]) from ``digests``, as it has them."""
        logits = self.in_draft_vocab(self._logits(tokens))
        return logits if digests is None or not self.probabilities else with_digests(logits, digests)

    def steer(self, agree: list[int], near: list[int]) -> None:
        """Set ``agree`` for the rows of the next step, and how many drafts behind these are to come close."""
        self.agree[: len(agree)].copy_(torch.tensor(agree))
        self.near[: len(near)].copy_(torch.tensor(near)).add_(self.agree[: len(near)])

    def steer_automata(self, agree: list[int], match: list[int]) -> None:
        """Set ``sa_agree`` and ``sa_match`` for the rows of the next step that have an automaton."""
        self.sa_agree[: len(agree)].copy_(torch.tensor(agree))
        self.sa_match[: len(match)].copy_(torch.tensor(match))

    def disturb(self, tokens: Tensor, attn_metadata: Any) -> Tensor:
        """``tokens`` of the generations, int64 [G * drafts], some of them turned into ones to disagree with."""
        first, gens = attn_metadata.num_contexts, attn_metadata.num_generations
        depths = torch.arange(len(tokens) // gens, device=tokens.device)
        agrees = (self.agree[first : first + gens].unsqueeze(1) > depths).flatten()
        return torch.where(agrees, tokens, disagree(tokens))


class SteeredLogitsProcessor(nn.Module):
    """A draft head that disagrees where it is told to; one call per depth, or all depths in one when parallel."""

    def __init__(self, steering: Steering, parallel: bool) -> None:
        super().__init__()
        self.steering = steering
        self.parallel = parallel

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Logits of the drafts, float32 [rows, VOCAB_SIZE]; moves on by one depth unless parallel."""
        tokens = lm_head(hidden_states)
        if self.parallel:
            return self.steering.logits(self.steering.disturb(tokens, attn_metadata), hidden_states[:, 1])
        agrees = self.steering.agree[: len(tokens)] > self.steering.depth
        is_near = self.steering.near[: len(tokens)] > self.steering.depth
        self.steering.depth += 1
        others = torch.where(is_near, near(tokens), disagree(tokens))
        return self.steering.logits(torch.where(agrees, tokens, others), hidden_states[:, 1])


class SteeredMTPHead(SteeredLogitsProcessor):
    """The head of a layer of vanilla MTP, which finds the last row of each sequence itself."""

    def __init__(self, steering: Steering) -> None:
        super().__init__(steering, parallel=False)

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Logits of the drafts, float32 [n, VOCAB_SIZE], of rows int64 [tokens, 2]."""
        last_tokens = torch.cumsum(attn_metadata.seq_lens_cuda, dim=0) - 1
        return super().forward(hidden_states.index_select(0, last_tokens), lm_head, attn_metadata)


class SteeredTreeLogitsProcessor(nn.Module):
    """A draft head that offers several candidates per node: one is steered as a chain's draft at its depth.

    It is the best one, but for the last layer of trees that are no chains: verification has to look further there.
    """

    def __init__(self, steering: Steering, spec_config: DecodingConfig) -> None:
        super().__init__()
        self.steering = steering
        self.topk = spec_config.dynamic_tree_max_topK
        is_chain = spec_config.max_total_draft_tokens == spec_config.max_draft_len
        self.depth_with_decoys = None if is_chain else spec_config.max_draft_len - 1

    def forward(
        self, hidden_states: Tensor, lm_head: nn.Module, attn_metadata: Any, return_context_logits: bool = False
    ) -> Tensor:
        """Log probabilities, float32 [n * nodes, VOCAB_SIZE], of so many nodes of each row; moves on by one depth."""
        tokens = lm_head(hidden_states)
        batch_size = attn_metadata.num_seqs
        agrees = self.steering.agree[:batch_size].unsqueeze(1) > self.steering.depth
        agrees = agrees.expand(-1, len(tokens) // batch_size).flatten()
        first = torch.where(agrees, tokens, disagree(tokens))
        with_decoys = self.steering.depth == self.depth_with_decoys
        self.steering.depth += 1
        return self.steering.in_draft_vocab(log_probabilities(tokens, first, self.topk, with_decoys))


class MarkovHead(nn.Module):
    """Corrects the logits of a block, float32 [G, K, VOCAB_SIZE or more]: here is where DSpark is steered."""

    def __init__(self, steering: Steering) -> None:
        super().__init__()
        self.steering = steering

    def forward(self, block_logits: Tensor, attn_metadata: Any) -> Tensor:
        """The block's logits, some of their first choices turned into ones to disagree with."""
        tokens = torch.argmax(block_logits, dim=-1).flatten()
        digests = digests_of(block_logits).flatten() if self.steering.probabilities else None
        return self.steering.logits(self.steering.disturb(tokens, attn_metadata), digests).view_as(block_logits)


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

    They have no experts; the counts that they are given are those of the attention metadata while they run."""

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
