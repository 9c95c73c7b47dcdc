"""``DSAtrtllmAttentionMetadata``: what an indexer and sparse attention know of the batch beside the dense buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from engines.portable._utils import is_current_stream_capturing, maybe_pin_memory
from engines.portable.attention.backends.sparse.dsa.indexer import Indexer, slots_of
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

if TYPE_CHECKING:
    from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager


_CACHE_FIELDS: Final = (
    "slot_mapping_fp8",
    "slot_mapping_scale",
    "indexer_k_cache_block_offsets",
    "block_table",
    "host_indexer_k_cache_block_offsets",
)
"""What is said of one KV cache beside its block offsets."""


def build_req_idx_per_token(seq_lens: Tensor, num_tokens: int) -> Tensor:
    """Row of each of ``num_tokens`` tokens: int64 [num_tokens], on the device of ``seq_lens``, int32 [n].

    Works on the device alone. Tokens beyond the sum of the lengths belong to the last row.
    """
    tokens = torch.arange(num_tokens, device=seq_lens.device)
    return torch.searchsorted(seq_lens.cumsum(0), tokens, right=True).clamp_(max=len(seq_lens) - 1)


@dataclass(kw_only=True, eq=False, repr=False)
class DSAtrtllmAttentionMetadata(TrtllmAttentionMetadata):
    """Adds maps from tokens to rows and slots, which follow layout and lengths wherever a hook tells of a change.

    req_idx_per_token              int32 [max_num_tokens], device: batch row of each token
    slot_mapping_fp8, _scale       int64 [max_num_tokens], device: byte offsets of each token in the indexer's pool
    indexer_k_cache_block_offsets  int32 [rows, max_blocks_per_seq], device: pages of each row in that pool, never -1
    block_table                    int32 [rows, max_blocks_per_seq], device: pages of each row, -1 after the last used
    gen_kv_indptr, gen_cached_token_indptr  int64 [rows + 1], device: running totals over the generations
    kv_lens_cuda_2d                int32 [rows, 1 + max_draft_tokens], device: KV length of each generation
    max_gen_seq_len                host: longest query of a generation, 0 without generations
    draft_slot_mapping_fp8, ...    the same of slots and tables for a separate draft KV cache; written when it is
        referred to
    host_req_idx_per_token, host_indexer_k_cache_block_offsets  what the last ``prepare`` uploaded
    """

    kv_cache_manager: DSACacheManager = None  # type: ignore[assignment]
    draft_kv_cache_manager: DSACacheManager | None = None
    max_draft_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, tokens, pages = self.max_num_requests, self.max_num_tokens, self.kv_cache_block_offsets.shape[-1]
        self.req_idx_per_token = self._device_buffer(tokens)
        self.slot_mapping_fp8 = self._device_buffer(tokens).long()
        self.slot_mapping_scale = self._device_buffer(tokens).long()
        self.indexer_k_cache_block_offsets = self._device_buffer(rows, pages)
        self.block_table = self._device_buffer(rows, pages)
        self.gen_kv_indptr = self._device_buffer(rows + 1).long()
        self.gen_cached_token_indptr = self._device_buffer(rows + 1).long()
        self.kv_lens_cuda_2d = self._device_buffer(rows, 1 + self.max_draft_tokens)
        self.max_gen_seq_len = 0
        self._tokens = torch.arange(tokens, device=self.device)
        if self.draft_kv_cache_manager is not None:
            draft_pages = self.draft_kv_cache_manager.max_blocks_per_seq
            self.draft_slot_mapping_fp8 = self._device_buffer(tokens).long()
            self.draft_slot_mapping_scale = self._device_buffer(tokens).long()
            self.draft_indexer_k_cache_block_offsets = self._device_buffer(rows, draft_pages)
            self.draft_block_table = self._device_buffer(rows, draft_pages)
            self.draft_host_indexer_k_cache_block_offsets = self._host_buffer(rows, draft_pages)
        self._pool_cache_valid = False

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step; map and slots are built on the host."""
        super().prepare()
        self._invalidate_pool_view_cache()
        self.max_gen_seq_len = max(self.seq_lens[self.num_contexts :].tolist(), default=0)
        self.prepare_for_indices_conversion()
        self.prepare_for_indexer_k_cache()
        self._update_gen_indptr()
        self._update_kv_lens_2d()
        Indexer.prepare(self)

    def prepare_for_indices_conversion(self) -> None:
        """Name the row of each token."""
        rows = torch.repeat_interleave(torch.arange(self.num_seqs, dtype=torch.int32), self.seq_lens)
        self.host_req_idx_per_token = maybe_pin_memory(rows, self.device)
        self.req_idx_per_token[: self.num_tokens].copy_(self.host_req_idx_per_token, non_blocking=True)

    def prepare_for_indexer_k_cache(self) -> None:
        """Write the tables of pages, the indexer's and the one that selected positions are read through.

        The latter covers what the draft loop appends too: upstream's ends with the target's lengths, and a draft
        forward that enters a new page finds none there.
        """
        assert self.request_ids is not None, "prepare: request_ids is not set"
        n, manager = self.num_seqs, self.kv_cache_manager
        pages = manager.get_pool_block_indices(self.request_ids)
        self.host_indexer_k_cache_block_offsets = pages * manager.indexer_k_cache_page_scale
        self.indexer_k_cache_block_offsets[:n].copy_(
            maybe_pin_memory(self.host_indexer_k_cache_block_offsets, self.device), non_blocking=True
        )
        used = (self.kv_lens[:n] + manager.tokens_per_block - 1) // manager.tokens_per_block
        table = torch.where(torch.arange(pages.shape[1]) < used.unsqueeze(1), pages, -1)
        self.block_table[:n].copy_(maybe_pin_memory(table, self.device), non_blocking=True)

    def on_update_kv_lens(self) -> None:
        """Derive anew, on the device, all that depends on lengths and layout (PR #16925)."""
        super().on_update_kv_lens()
        self._invalidate_pool_view_cache()
        if self.num_tokens:
            self._update_req_idx_per_token()
            if self.kv_cache_manager is not None:
                self._update_slot_mappings()
        if self.num_generations:
            self._update_gen_indptr()
            self._update_kv_lens_2d()

    def update_for_spec_dec(self) -> None:
        """Follow a draft loop: what it changed, and one row per generation from now on."""
        super().update_for_spec_dec()
        self.max_gen_seq_len = 1
        self.on_update_kv_lens()

    def restore_after_draft_forward(self, saved: dict[str, Any]) -> None:
        """Refer to what ``prepare_for_draft_forward`` returned."""
        super().restore_after_draft_forward(saved)
        self._invalidate_pool_view_cache()

    def _fields_with_draft_twins(self) -> tuple[str, ...]:
        return (*super()._fields_with_draft_twins(), *_CACHE_FIELDS)

    def _refer_to_draft_twins(self) -> None:
        """Also write them, tables and slots: all but in a graph, whose runner does it before each replay.

        The slots are those of the target's layout, by host lengths; a drafter that feeds other rows tells the hooks.
        """
        super()._refer_to_draft_twins()
        self._invalidate_pool_view_cache()
        if not is_current_stream_capturing():
            self.prepare_for_indexer_k_cache()
            Indexer.recompute_slot_mappings(self)

    def _update_req_idx_per_token(self) -> None:
        """Row of each token by the device's lengths."""
        rows = build_req_idx_per_token(self.seq_lens_cuda, self.num_tokens)
        self.req_idx_per_token[: self.num_tokens].copy_(rows)

    def _update_slot_mappings(self) -> None:
        """Slot of each token: the last token of a row is at its KV length - 1, the others before it."""
        tokens = self.num_tokens
        req_idx = self.req_idx_per_token[:tokens]
        first = self.kv_lens_cuda[: self.num_seqs] - self.seq_lens_cuda.cumsum(0)
        positions = self._tokens[:tokens] + first.index_select(0, req_idx)
        fp8, scale = slots_of(positions, self.indexer_k_cache_block_offsets, req_idx, self.kv_cache_manager)
        self.slot_mapping_fp8[:tokens].copy_(fp8)
        self.slot_mapping_scale[:tokens].copy_(scale)

    def _update_gen_indptr(self) -> None:
        contexts, n = self.num_contexts, self.num_seqs
        kv, query = self.kv_lens_cuda[contexts:n], self.seq_lens_cuda[contexts:]
        end = n - contexts + 1
        torch.cumsum(kv, 0, dtype=torch.int64, out=self.gen_kv_indptr[1:end])
        torch.cumsum(kv - query, 0, dtype=torch.int64, out=self.gen_cached_token_indptr[1:end])

    def _update_kv_lens_2d(self) -> None:
        contexts, n = self.num_contexts, self.num_seqs
        self.kv_lens_cuda_2d[: n - contexts].copy_(self.kv_lens_cuda[contexts:n].unsqueeze(1))

    def _invalidate_pool_view_cache(self) -> None:
        """Tell the layers that what they share in a forward is out of date."""
        self._pool_cache_valid = False

    def _ensure_pool_view_cached(self) -> None:
        """Take out of map and table what all layers of a forward share: contexts and generations apart."""
        if self._pool_cache_valid:
            return
        contexts, ctx_tokens = self.num_contexts, self.num_ctx_tokens
        self._cached_block_table_ctx = self.block_table[:contexts]
        self._cached_block_table_gen = self.block_table[contexts : self.num_seqs]
        self._cached_req_idx_ctx = self.req_idx_per_token[:ctx_tokens]
        # A copy, not a view: it counts from the first generation.
        self._cached_req_idx_gen: Tensor = self.req_idx_per_token[ctx_tokens : self.num_tokens] - contexts
        self._pool_cache_valid = True
