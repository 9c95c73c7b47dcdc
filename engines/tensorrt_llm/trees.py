"""Trees of drafts for upstream's worker: stand-ins of the kernels that it calls, and what holds the trees.

The kernels do what the portable engine's functions do. Scores are probabilities here, as the worker makes them with a
softmax; they are read back as the whole logarithms that the steered head has made them of, so that ties are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from engines.portable.attention.backends.trtllm import TARGET_LAYER
from engines.portable.speculative.drafter import Setting
from engines.portable.speculative.dynamic_tree_ops import (
    DynamicTree,
    build_dynamic_tree,
    pack_mask,
    packed_words,
    update_kv_cache_draft_token_location,
    verify_dynamic_tree_greedy,
)
from engines.portable.speculative.spec_tree_manager import SpecTreeManager
from engines.tensorrt_llm.cache_managers import KVCacheManager

_SCALE: Final = 1 << 14
"""Steps of a score per power of two of its probability."""

_LAYER: Final = 8
"""Binary logarithm of what a layer divides the best probability by, so that those offered leave room for the rest."""


def probability_logits(scores: Tensor) -> Tensor:
    """Logits, float64, whose softmax holds a probability for each score, whole numbers and minus infinity for none.

    What the scores leave over is divided among the others, each of which is then less likely than any that has one.
    """
    offered = scores > -torch.inf
    likely = torch.where(offered, torch.exp2(scores.double() / _SCALE - _LAYER), 0)
    rest = (1 - likely.sum(-1, keepdim=True)) / (~offered).sum(-1, keepdim=True)
    return torch.where(offered, likely, rest).log()


def _scores(probabilities: Tensor) -> Tensor:
    """The scores behind products of probabilities, of which each layer has lowered by ``_LAYER``: int64."""
    return (probabilities.double().log2() * _SCALE).round().long()


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the best, of equal ones the earlier first: int64 [B, count]."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]


def select_topk_draft_tokens(
    tokens: Tensor, scores: Tensor, previous: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The best candidates of a layer, of tokens and scores [B, topk, topk] and the parents' scores [B, topk].

    Returns tokens, scores, indices and parents of those kept, [B, topk] each, then tokens and scores of all.
    """
    tokens, scores = tokens.flatten(1), (scores * previous.unsqueeze(2)).flatten(1)
    kept = _best(_scores(scores), topk)
    return tokens.gather(1, kept), scores.gather(1, kept), kept, kept // topk, tokens, scores


def build_mask_and_position(
    mask: Tensor, parents: Tensor, itself: Tensor, offsets: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """Masks, [B, nodes, nodes], and offsets, [B, nodes], with a layer added whose parents are in the last one."""
    of_parents = mask[:, -topk:].gather(1, parents.unsqueeze(2).expand(-1, -1, mask.shape[2]))
    added = torch.cat([of_parents, itself], dim=2)
    grown = torch.cat([torch.nn.functional.pad(mask, (0, topk)), added], dim=1)
    return grown, torch.cat([offsets, offsets[:, -topk:] + 1], dim=1)


def resample_final_tokens(scores: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best nodes of all that were made, in the order in which they were made: tokens and indices."""
    lowered = _scores(scores)
    # Each layer has lowered a score by so much, and the head's own scores add up to less.
    by_layer = _LAYER * _SCALE
    depths = -lowered // by_layer
    selected = _best(lowered + depths * by_layer, count).sort(dim=1).values
    return tokens.gather(1, selected), selected


class GatherRepackStep0Kernel:
    """Upstream's kernel of this name, launched as ``kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    @staticmethod
    def _launch(
        hidden_states: Tensor, accepted: Tensor, position_ids: Tensor, nodes: Tensor, num_accepted: Tensor,
        hidden_out: Tensor, ids_out: Tensor, positions_out: Tensor, gather_out: Tensor,
        num_ctx_tokens: int, num_contexts: int, width: int, path: int, *rest: int, BLOCK_H: int,
    ) -> None:  # fmt: skip
        """Lay accepted paths out, ``path`` rows per generation; ``nodes`` int32 [G, path - 1], -1 behind their end."""
        num_gens = len(accepted)
        gen = torch.arange(num_gens, device=accepted.device)
        roots = (num_ctx_tokens + gen * width).unsqueeze(1)
        rows = roots + torch.nn.functional.pad(nodes.long() + 1, (1, 0))
        count = num_gens * path
        hidden_out[:count] = hidden_states.index_select(0, rows.flatten())
        ids_out[:count] = accepted.flatten()
        place = torch.arange(path, dtype=torch.int32, device=accepted.device)
        positions_out[:count] = (position_ids[roots] + place).flatten()
        last = num_accepted[num_contexts : num_contexts + num_gens] - 1
        gather_out[num_contexts : num_contexts + num_gens] = num_ctx_tokens + gen * path + last


class DynamicTreeOpsConverter:
    """Upstream's class of this name, as far as greedy verification goes."""

    def __init__(self, *, dynamic_tree_max_topK: int, max_draft_len: int, **sizes: Any) -> None:
        self._topk = dynamic_tree_max_topK
        self._depth = max_draft_len

    def verify_dynamic_tree_greedy_out_packed(
        self,
        candidates: Tensor,
        retrieve_packed: tuple[Tensor, Tensor],
        target_predict: Tensor,
        num_gens: int,
        path: int,
        *,
        tree_valid: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes of each walk, how many of them follow the root, and the target's choices along it."""
        return verify_dynamic_tree_greedy(
            candidates, *retrieve_packed, target_predict, tree_valid, self._topk, self._depth
        )

    def build_dynamic_tree(
        self,
        *,
        history_draft_tokens_parent_buffer: Tensor,
        topk_score_indices: Tensor,
        tree_mask: Tensor,
        positions: Tensor,
        retrieve_next_token: Tensor,
        retrieve_next_sibling: Tensor,
        **rest: Any,
    ) -> None:
        """Write the trees of the nodes that were kept to the buffers."""
        tree = build_dynamic_tree(history_draft_tokens_parent_buffer, topk_score_indices, self._topk, self._depth)
        buffers = (tree_mask, positions, retrieve_next_token, retrieve_next_sibling)
        for buffer, part in zip(buffers, tree, strict=True):
            buffer.copy_(part)


class TreeResources(SpecTreeManager):
    """The portable engine's manager of trees, with what upstream's worker asks of its resource and its tree manager.

    spec_dec_packed_mask, spec_dec_position_offsets, retrieve_...  trees that are being built, [max_num_requests, ...]
    """

    hidden_states = None

    def __init__(self, num_slots: int, num_nodes: int, max_num_requests: int, device: torch.device) -> None:
        super().__init__(num_slots, num_nodes, max_num_requests, device)
        storage: Any = self.slot_storage
        storage.pack_retrieve_from_slots = self._links
        rows = max_num_requests
        self.spec_dec_packed_mask = torch.zeros(
            rows, num_nodes, packed_words(num_nodes), dtype=torch.int32, device=device
        )
        self.spec_dec_position_offsets = torch.zeros(rows, num_nodes, dtype=torch.int32, device=device)
        self.retrieve_index, self.retrieve_next_token, self.retrieve_next_sibling = (
            torch.zeros(rows, num_nodes, dtype=torch.int64, device=device) for _ in range(3)
        )

    @property
    def spec_tree_manager(self) -> TreeResources:
        """Where upstream's worker looks for it."""
        return self

    def _links(self, slots: Tensor, num_gens: int) -> tuple[Tensor, Tensor]:
        storage = self.slot_storage
        links = storage.retrieve_next_token, storage.retrieve_next_sibling
        return links[0].index_select(0, slots), links[1].index_select(0, slots)

    def compute_spec_dec_packed_mask(self, mask: Tensor, packed: Tensor) -> None:
        """Write the bits of ``mask``, [B, nodes, nodes], to the first words of ``packed``."""
        packed.zero_()
        words = packed_words(mask.shape[2])
        packed[:, :, :words] = pack_mask(mask.bool(), words)

    def scatter_to_slot_storage(self, slot_storage: Any, slots: Tensor, num_gens: int) -> None:
        """Keep the trees that were built, one per slot of ``slots``."""
        parts = (
            self.spec_dec_packed_mask,
            self.spec_dec_position_offsets,
            self.retrieve_next_token,
            self.retrieve_next_sibling,
        )
        slot_storage.scatter_to_slot_storage(slots, DynamicTree(*(part[:num_gens] for part in parts)))


def tree_resources(setting: Setting) -> TreeResources:
    """The trees of all requests that may run."""
    config = setting.spec_config
    return TreeResources(setting.num_slots, 1 + config.max_total_draft_tokens, setting.max_num_requests, setting.device)


class TreeKVCacheManager(KVCacheManager):
    """The manager with what says of a cache how its entries are moved: one layer with one head, one pool."""

    head_dim = 2
    dtype = None
    num_kv_heads_per_layer = (1,)

    def __init__(self, *, max_total_draft_tokens: int, **sizes: Any) -> None:
        super().__init__(max_total_draft_tokens=max_total_draft_tokens, **sizes)
        self.max_total_draft_tokens = max_total_draft_tokens

    @property
    def max_attention_window_vec(self) -> list[int]:
        """The longest KV length that attention sees."""
        return [self.max_seq_len]

    @property
    # The class above has none.
    def kv_cache_pool_pointers(self) -> list[Tensor]:  # type: ignore[override]
        """In place of its address, the pool of the target's layer."""
        return [self.get_buffers(TARGET_LAYER)]


def _relocate(
    nodes: Tensor, num_accepted: Tensor, kv_lens: Tensor, is_2d: bool, layers: int, heads: int, head_bytes: int,
    rewind: int, window: int, pool: Tensor, block_offsets: Tensor, *rest: Any,
) -> None:  # fmt: skip
    """Move entries of accepted nodes, int32 [B, D], to where a chain's would be; contexts accept none of them."""
    update_kv_cache_draft_token_location(
        pool,
        block_offsets[: len(nodes), 0],
        torch.nn.functional.pad(nodes.long() + 1, (1, 0)),
        num_accepted,
        (kv_lens - rewind - 1).clamp(min=0),
    )


@contextmanager
def relocation() -> Iterator[None]:
    """Let ``torch.ops.tensorrt_llm`` have the operator that moves entries of accepted nodes, while inside."""
    ops: Any = torch.ops
    outside = vars(ops).get("tensorrt_llm")
    ops.tensorrt_llm = SimpleNamespace(update_kv_cache_draft_token_location_2d=_relocate)
    try:
        yield
    finally:
        del ops.tensorrt_llm
        if outside is not None:
            ops.tensorrt_llm = outside
