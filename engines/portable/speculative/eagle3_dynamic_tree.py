"""Dynamic trees: each layer of drafts offers several candidates per node, and the best nodes of all are verified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.portable.attention.backends.trtllm import TARGET_LAYER
from engines.portable.distributed import all_rank_num_tokens_kept
from engines.portable.heads import SteeredTreeLogitsProcessor
from engines.portable.models import Eagle3DraftModel
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.drafter import Drafter, Setting
from engines.portable.speculative.dynamic_tree_ops import (
    build_dynamic_tree,
    pack_mask,
    packed_words,
    update_kv_cache_draft_token_location,
    verify_dynamic_tree_greedy,
)
from engines.portable.speculative.eagle3 import Eagle3OneModelSpecMetadata, Eagle3OneModelWorker
from engines.portable.speculative.linear import DraftInputs
from engines.portable.speculative.mode import SpeculativeDecodingMode
from engines.portable.speculative.spec_tree_manager import SpecTreeManager
from scenarios.tracer import PAD_TOKEN


class DraftNodes:
    """The trees of a batch while they grow by layers.

    Every node that was made is kept with its score; the ``topk`` best of each layer are fed to the drafter, behind
    those of the layers before, and make the next layer. Scores are logarithms: a node's is its parent's plus its own.

    tokens, positions     int32 [B, fed]
    hidden_states         [B, fed, hidden_size]: of the node that made each
    mask                  bool [B, fed, fed]: which of the nodes fed are on the path of each
    position_offsets      int32 [B, fed]: depth, 0 for the first layer
    history_tokens        int32 [B, made]; ``history_scores`` float32
    history_parents       int64 [B, 1 + nodes that made others]: which of those made each is, -1 for the root
    """

    def __init__(self, positions: Tensor, hidden_states: Tensor, topk: int) -> None:
        """Start from the rows that the drafts follow: their positions, int32 [B], and hidden states."""
        batch_size, device = len(positions), positions.device
        self.topk = topk
        self.layers = 0
        self.tokens = self.position_offsets = self.positions = positions.new_zeros(batch_size, 0)
        self.hidden_states = hidden_states.new_zeros(batch_size, 0, hidden_states.shape[1])
        self.mask = torch.zeros(batch_size, 0, 0, dtype=torch.bool, device=device)
        self.history_tokens = self.tokens
        self.history_scores = torch.zeros(batch_size, 0, device=device)
        self.history_parents = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        self._position = positions.unsqueeze(1)
        self._scores = torch.zeros(batch_size, 1, device=device)
        self._mask = torch.zeros(batch_size, 1, 0, dtype=torch.bool, device=device)
        self._of_history = torch.full((batch_size, 1), -1, dtype=torch.int64, device=device)

    def grow(self, tokens: Tensor, scores: Tensor, hidden_states: Tensor) -> None:
        """Add a layer: candidates, [B, parents, topk], and hidden states, [B, parents, hidden_size], of its parents."""
        topk, made = self.topk, self.history_tokens.shape[1]
        tokens, scores = tokens.flatten(1), (self._scores.unsqueeze(2) + scores).flatten(1)
        self.history_tokens = torch.cat([self.history_tokens, tokens], dim=1)
        self.history_scores = torch.cat([self.history_scores, scores], dim=1)
        self.history_parents = torch.cat([self.history_parents, self._of_history], dim=1)
        kept = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :topk]
        parents = kept // topk
        self._scores, self._of_history = scores.gather(1, kept), made + kept
        itself = torch.eye(topk, dtype=torch.bool, device=kept.device).expand(len(kept), -1, -1)
        self._mask = torch.cat([_of_parents(self._mask, parents), itself], dim=2)
        self.mask = torch.cat([torch.nn.functional.pad(self.mask, (0, topk)), self._mask], dim=1)
        self.tokens = torch.cat([self.tokens, tokens.gather(1, kept)], dim=1)
        self.hidden_states = torch.cat([self.hidden_states, _of_parents(hidden_states, parents)], dim=1)
        depth = torch.full_like(self.tokens[:, -topk:], self.layers)
        self.position_offsets = torch.cat([self.position_offsets, depth], dim=1)
        self.positions = self._position + 1 + self.position_offsets
        self.layers += 1

    def inputs(self) -> DraftInputs:
        """What the drafter is fed: all nodes of one sequence, then those of the next."""
        return {
            "input_ids": self.tokens.flatten(),
            "position_ids": self.positions.flatten(),
            "hidden_states": self.hidden_states.flatten(0, 1),
        }

    def last_rows(self) -> Tensor:
        """Rows of the last layer in those inputs: int64 [B * topk]."""
        rows = torch.arange(self.tokens.numel(), device=self.tokens.device)
        return rows.view_as(self.tokens)[:, -self.topk :].flatten()


def _of_parents(values: Tensor, parents: Tensor) -> Tensor:
    """What belongs to the parent of each new node, of values [B, any, width]: [B, nodes, width]."""
    return values.gather(1, parents.unsqueeze(2).expand(-1, -1, values.shape[2]))


class Eagle3OneModelDynamicTreeWorker(Eagle3OneModelWorker):
    """Eagle3 with a tree per generation: ``max_total_draft_tokens`` nodes are verified, of depth Kmax at most.

    A verified path is moved to where a chain would be, and fed to the drafter with Kmax + 1 rows per generation;
    then each layer feeds all nodes of the trees so far. Contexts take part, but keep no tree.
    """

    def __init__(self, spec_config: DecodingConfig) -> None:
        super().__init__(spec_config)
        self.dynamic_tree_max_topK = spec_config.dynamic_tree_max_topK
        self.max_total_draft_tokens = spec_config.max_total_draft_tokens
        self.tokens_per_gen_step = 1 + self.max_total_draft_tokens
        self._max_path_len = 1 + spec_config.max_draft_len
        self._kv_correction = self.tokens_per_gen_step - self._max_path_len
        self._accept_index: Tensor
        self._saved_packed_mask: Tensor | None = None
        self._saved_position_offsets: Tensor | None = None
        self._saved_generation_lengths: Tensor | None = None

    def _prepare_attn_metadata_for_spec_dec(self, attn_metadata: Any, *fields: str) -> None:
        """Save the contents of the masks as well: graphs know where they are."""
        n = attn_metadata.num_seqs
        self._saved_packed_mask = attn_metadata.spec_decoding_packed_mask[:n].clone()
        self._saved_position_offsets = attn_metadata.spec_decoding_position_offsets.clone()
        self._saved_generation_lengths = attn_metadata.spec_decoding_generation_lengths[:n].clone()
        # Last: what is not open is not restored, and upstream's cleanup may find an older save.
        super()._prepare_attn_metadata_for_spec_dec(attn_metadata, *fields)

    def _restore_attn_metadata_from_spec_dec(self, attn_metadata: Any) -> None:
        n = attn_metadata.num_seqs
        attn_metadata.spec_decoding_packed_mask[:n].copy_(self._saved_packed_mask)
        attn_metadata.spec_decoding_position_offsets.copy_(self._saved_position_offsets)
        attn_metadata.spec_decoding_generation_lengths[:n].copy_(self._saved_generation_lengths)
        super()._restore_attn_metadata_from_spec_dec(attn_metadata)

    def sample_and_accept_draft_tokens(
        self, logits: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """The target's tokens along the verified path, int32 [n, Kmax + 1], and how many count, int32 [n].

        Moves the cache entries of that path to where those of a chain would be.
        """
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        target_tokens = self._sample_tokens_for_batch(logits)
        target_predict = target_tokens[num_contexts:].view(batch_size - num_contexts, self.tokens_per_gen_step)
        draft_tokens = spec_metadata.draft_tokens.view(len(target_predict), self.max_total_draft_tokens)
        storage = spec_metadata.spec_resource_manager.slot_storage
        slots = storage.all_ids_buf[num_contexts:batch_size]
        self._accept_index, num_accepted_drafts, choices = verify_dynamic_tree_greedy(
            # Nothing has the root for a child, so its token is never looked at.
            torch.nn.functional.pad(draft_tokens, (1, 0)),
            storage.retrieve_next_token.index_select(0, slots),
            storage.retrieve_next_sibling.index_select(0, slots),
            target_predict,
            storage.has_tree.index_select(0, slots),
            self.dynamic_tree_max_topK,
            self.max_draft_len,
        )
        accepted_tokens = torch.full(
            (batch_size, self._max_path_len), PAD_TOKEN, dtype=torch.int32, device=logits.device
        )
        num_accepted_tokens = torch.ones(batch_size, dtype=torch.int32, device=logits.device)
        accepted_tokens[:num_contexts, 0] = target_tokens[:num_contexts]
        accepted_tokens[num_contexts:] = choices
        num_accepted_tokens[num_contexts:] += num_accepted_drafts
        self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts, self.max_draft_len, spec_metadata)
        self._relocate_kv_eagerly(attn_metadata, num_accepted_tokens)
        return accepted_tokens, num_accepted_tokens

    def _accepted_leaf_positions(self, num_accepted: Tensor, attn_metadata: Any) -> Tensor:
        accepted = num_accepted[attn_metadata.num_contexts :]
        return self._accept_index.gather(1, (accepted - 1).long().unsqueeze(1)).squeeze(1)

    def _relocate_kv_eagerly(self, attn_metadata: Any, num_accepted: Tensor) -> None:
        """Move the target's entries of accepted nodes; the drafter is fed the accepted path anew."""
        rows = slice(attn_metadata.num_contexts, attn_metadata.num_seqs)
        update_kv_cache_draft_token_location(
            attn_metadata.kv_cache_manager.get_buffers(TARGET_LAYER),
            attn_metadata.kv_cache_block_offsets[0, rows, 0],
            self._accept_index,
            num_accepted[rows],
            attn_metadata.kv_lens_cuda[rows] - self.tokens_per_gen_step,
        )

    def prepare_1st_drafter_inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        accepted_tokens: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
    ) -> DraftInputs:
        """Inputs of the first draft forward: contexts shifted by one, then Kmax + 1 rows per generation.

        Those are the accepted path, with the target's hidden states of its nodes, and placeholders behind it.
        """
        num_contexts, num_ctx_tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        positions = position_ids.squeeze(0)
        gens = spec_metadata.batch_indices_cuda[: attn_metadata.num_generations]
        roots = (gens * self.tokens_per_gen_step + num_ctx_tokens).unsqueeze(1)
        path = torch.arange(self._max_path_len, dtype=torch.int32, device=positions.device)
        context_ids = self._prepare_context_input_ids(input_ids, attn_metadata, spec_metadata, accepted_tokens)
        hidden = self._drafter_hidden_states(draft_model, hidden_states, spec_metadata)
        gen_positions = positions[roots] + path
        gen_hidden = hidden.index_select(0, (roots + self._accept_index).flatten())
        return {
            "input_ids": torch.cat([context_ids, accepted_tokens[num_contexts:].flatten()]),
            "position_ids": torch.cat([positions[:num_ctx_tokens], gen_positions.flatten()]),
            "hidden_states": torch.cat([hidden[:num_ctx_tokens], gen_hidden]),
        }

    def sample_draft_tokens(self, logits: Tensor, spec_metadata: Any, draft_step: int | None = None) -> Tensor:
        """The best candidates of each row, best first: int32 [rows, topk]."""
        return self._map_draft_tokens(torch.topk(logits, self.dynamic_tree_max_topK, dim=-1).indices)

    def _forward_draft_loop(
        self, draft_model: Any, inputs: DraftInputs, num_accepted: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> Tensor:
        """Grow a tree per row, keep those of the generations for the next step: drafts, int32 [n, T]."""
        num_contexts = attn_metadata.num_contexts
        with all_rank_num_tokens_kept(attn_metadata):
            nodes = self._grow_trees(draft_model, inputs, num_accepted, attn_metadata, spec_metadata)
        return self._resample_final_tokens(nodes, num_contexts, spec_metadata)

    def _grow_trees(
        self, draft_model: Any, inputs: DraftInputs, num_accepted: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> DraftNodes:
        """All layers of the trees, and the metadata as the last one leaves it."""
        batch_size = attn_metadata.num_seqs
        self._lay_out_accepted_paths(attn_metadata)
        gather_ids = self._first_gather_ids(num_accepted, attn_metadata, spec_metadata)
        nodes = DraftNodes(
            inputs["position_ids"].index_select(0, gather_ids), inputs["hidden_states"], self.dynamic_tree_max_topK
        )
        for layer in range(self.max_draft_len):
            hidden, hidden_to_save = self._forward_draft_model(draft_model, inputs, attn_metadata, spec_metadata, layer)
            logits = self._draft_logits(draft_model, hidden.index_select(0, gather_ids), attn_metadata)
            tokens = self.sample_draft_tokens(logits, spec_metadata, draft_step=layer)
            scores = torch.topk(logits, self.dynamic_tree_max_topK, dim=-1).values
            nodes.grow(
                tokens.view(batch_size, -1, self.dynamic_tree_max_topK),
                scores.view(batch_size, -1, self.dynamic_tree_max_topK),
                hidden_to_save.index_select(0, gather_ids).view(batch_size, -1, hidden_to_save.shape[1]),
            )
            if layer == 0:
                self._forget_placeholders(attn_metadata, num_accepted)
            self._lay_out_nodes(attn_metadata, nodes)
            inputs, gather_ids = nodes.inputs(), nodes.last_rows()
        return nodes

    def _forward_draft_model(
        self, draft_model: Any, inputs: DraftInputs, attn_metadata: Any, spec_metadata: Any, draft_step: int
    ) -> tuple[Tensor, Tensor]:
        if draft_step and attn_metadata.all_rank_num_tokens is not None:
            attn_metadata.all_rank_num_tokens = spec_metadata.all_rank_num_seqs
        hidden, hidden_to_save = draft_model.model(**inputs, attn_metadata=attn_metadata, spec_metadata=spec_metadata)
        return hidden, hidden_to_save

    def _first_gather_ids(self, num_accepted: Tensor, attn_metadata: Any, spec_metadata: Any) -> Tensor:
        """The row of each sequence that its drafts follow: the last, or that of the last accepted token."""
        num_contexts, num_gens = attn_metadata.num_contexts, attn_metadata.num_generations
        starts = spec_metadata.batch_indices_cuda[:num_gens] * self._max_path_len
        gens = starts + (num_accepted[num_contexts:] + (attn_metadata.num_ctx_tokens - 1))
        return torch.cat([spec_metadata.gather_ids[:num_contexts], gens])

    def _lay_out_accepted_paths(self, attn_metadata: Any) -> None:
        """From the trees that were verified to one path per generation, of which each row sees those before it."""
        gens = slice(attn_metadata.num_contexts, attn_metadata.num_seqs)
        num_gens, path = attn_metadata.num_generations, self._max_path_len
        causal = torch.ones(path, path, dtype=torch.bool, device=attn_metadata.device).tril()
        offsets = torch.arange(path, dtype=torch.int32, device=attn_metadata.device)
        attn_metadata.set_spec_decoding_rows(
            pack_mask(causal, packed_words(path)).expand(num_gens, -1, -1), offsets.expand(num_gens, -1)
        )
        attn_metadata._seq_lens[gens].fill_(path)
        attn_metadata._seq_lens_cuda[gens].fill_(path)
        attn_metadata.on_update()
        attn_metadata.kv_lens_cuda[gens].sub_(self._kv_correction)
        attn_metadata.update_for_spec_dec()
        attn_metadata.use_spec_decoding = num_gens > 0

    def _forget_placeholders(self, attn_metadata: Any, num_accepted: Tensor) -> None:
        """End each generation after its last accepted token."""
        gens = slice(attn_metadata.num_contexts, attn_metadata.num_seqs)
        attn_metadata.kv_lens_cuda[gens].add_(num_accepted[gens] - self._max_path_len)

    def _lay_out_nodes(self, attn_metadata: Any, nodes: DraftNodes) -> None:
        """Turn the batch into one generation per sequence, which feeds its nodes behind what is committed."""
        batch_size, rows = nodes.tokens.shape
        attn_metadata.set_spec_decoding_rows(pack_mask(nodes.mask, packed_words(rows)), nodes.position_offsets)
        attn_metadata._seq_lens[:batch_size].fill_(rows)
        attn_metadata._seq_lens_cuda[:batch_size].fill_(rows)
        attn_metadata.on_update()
        attn_metadata.host_request_types[: attn_metadata.num_contexts].fill_(1)
        attn_metadata.num_contexts = 0
        attn_metadata.kv_lens_cuda[:batch_size].add_(self.dynamic_tree_max_topK)
        attn_metadata.update_for_spec_dec()
        attn_metadata.use_spec_decoding = True

    def _resample_final_tokens(self, nodes: DraftNodes, num_contexts: int, spec_metadata: Any) -> Tensor:
        """Of all nodes made keep the best, in the order in which they were made; store the trees of generations."""
        order = torch.sort(nodes.history_scores, dim=1, descending=True, stable=True).indices
        selected = order[:, : self.max_total_draft_tokens].sort(dim=1).values
        drafts = nodes.history_tokens.gather(1, selected)
        drafts[:num_contexts].fill_(PAD_TOKEN)
        tree = build_dynamic_tree(
            nodes.history_parents[num_contexts:], selected[num_contexts:], nodes.topk, self.max_draft_len
        )
        storage = spec_metadata.spec_resource_manager.slot_storage
        storage.scatter_to_slot_storage(storage.all_ids_buf[num_contexts : len(drafts)], tree)
        return drafts


def tree_manager(setting: Setting) -> SpecTreeManager:
    """The trees of all requests that may run."""
    config = setting.spec_config
    return SpecTreeManager(
        setting.num_slots, 1 + config.max_total_draft_tokens, setting.max_num_requests, setting.device
    )


DRAFTERS = (
    Drafter(
        name="Eagle3OneModelDynamicTreeWorker",
        mode=SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
        use_dynamic_tree=True,
        worker=lambda setting: Eagle3OneModelDynamicTreeWorker(setting.spec_config),
        spec_metadata=lambda setting, manager: Eagle3OneModelSpecMetadata(
            **setting.sizes, **setting.capture, spec_resource_manager=manager
        ),
        draft_model=lambda setting: Eagle3DraftModel(
            setting.tracer, setting.steering, SteeredTreeLogitsProcessor(setting.steering, setting.spec_config)
        ),
        resource_manager=tree_manager,
    ),
)
