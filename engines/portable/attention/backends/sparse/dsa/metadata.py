"""``DSAtrtllmAttentionMetadata``: what an indexer and sparse attention know of the batch beside the dense buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from engines.portable._utils import host_tensor, is_current_stream_capturing, maybe_pin_memory
from engines.portable.attention.backends.sparse.dsa.dsl_topk import FP4_ATOMS, FP8_ATOMS, pick_split
from engines.portable.attention.backends.sparse.dsa.indexer import Indexer, slots_of
from engines.portable.attention.backends.sparse.dsa.params import DSAMetadataParams
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.copies import copy_to_device

if TYPE_CHECKING:
    from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
    from engines.portable.attention.backends.sparse.dsa.prefill import IndexerPrefillChunkMetadata


_CACHE_FIELDS: Final = (
    "slot_mapping_fp8",
    "slot_mapping_scale",
    "indexer_k_cache_block_offsets",
    "block_table",
    "block_table_expanded",
    "slot_mapping_fp8_fullkv",
    "slot_mapping_scale_fullkv",
    "host_indexer_k_cache_block_offsets",
)
"""What is said of one KV cache beside its block offsets."""


def build_req_idx_per_token(seq_lens: Tensor, num_tokens: int) -> Tensor:
    """Row of each of ``num_tokens`` tokens: int64 [num_tokens], on the device of ``seq_lens``, int32 [n].

    Works on the device alone. Tokens beyond the sum of the lengths belong to the last row.
    """
    tokens = torch.arange(num_tokens, device=seq_lens.device)
    return torch.searchsorted(seq_lens.cumsum(0), tokens, right=True).clamp_(max=len(seq_lens) - 1)


def dense_topk(kv_lens: Tensor, seq_lens: Tensor, num_tokens: int, index_topk: int) -> Tensor:
    """What tokens attend to that are given no selection: 0 up to their own place, then -1: int32 [tokens, index_topk].

    Lengths are int32 [n] on the device; the last token of a row is at its KV length - 1.
    """
    rows = build_req_idx_per_token(seq_lens, num_tokens)
    first = kv_lens - seq_lens.cumsum(0)
    places = torch.arange(num_tokens, device=seq_lens.device) + first.index_select(0, rows)
    columns = torch.arange(index_topk, dtype=torch.int32, device=seq_lens.device)
    return torch.where(columns <= places.unsqueeze(1), columns, -1)


@dataclass(kw_only=True, eq=False, repr=False)
class DSAtrtllmAttentionMetadata(TrtllmAttentionMetadata):
    """Adds maps from tokens to rows and slots, which follow layout and lengths wherever a hook tells of a change.

    req_idx_per_token              int32 [max_num_tokens], device: batch row of each token
    slot_mapping_fp8, _scale       int64 [max_num_tokens], device: byte offsets of each token in the indexer's pool
    indexer_k_cache_block_offsets  int32 [rows, max_blocks_per_seq], device: pages of each row in that pool, never -1
    block_table                    int32 [rows, max_blocks_per_seq], device: pages of each row, -1 after the last used
    gen_kv_indptr, gen_cached_token_indptr  int64 [rows + 1], device: running totals over the generations
    kv_lens_cuda_2d                int32 [rows, 1 + max_draft_tokens], device: KV length of each generation
    kv_lens_expanded_cuda, block_table_expanded  int32 [rows * (1 + max_draft_tokens)], and so many rows of pages:
        KV length and pages of each generation, repeated for a kernel that takes one query row per sequence
    row_req_idx_cuda, row_kv_correction_cuda, row_kv_lens_cuda  int32 [rows * (1 + max_draft_tokens)], device: of each
        row of the generations, where ``ragged_verify_lens`` has a number of them for each: its row in the batch, by how
        much its KV length is less than that one's, and its KV length
    topk_indices_buffer            int32 [max_num_tokens, index_topk], device: what tokens of short sequences attend to
    cu_seqlen_ks, cu_seqlen_ke     int32 [max_num_tokens], device: window of each context token, see ``IndexerParams``
    slot_mapping_fp8_fullkv, slot_mapping_scale_fullkv  int64, device: slots of all keys of the contexts
    max_gen_seq_len                host: longest query of a generation, 0 without generations
    skip_indexer_for_ctx_reqs, skip_indexer_for_gen_reqs  host: whether all of these are short
    indexer_schedule_stale         host: lengths have moved on since the kernels' plan was made
    draft_slot_mapping_fp8, ...    the same of slots and tables for a separate draft KV cache; written when it is
        referred to
    host_req_idx_per_token, host_indexer_k_cache_block_offsets  what the last ``prepare`` uploaded

    Flags are baked into a graph, so its metadata skips nothing (upstream captures a graph for short sequences too).
    """

    # A narrower type of the field, which keeps its place and its default.
    kv_cache_manager: DSACacheManager = None  # type: ignore[assignment]
    draft_kv_cache_manager: DSACacheManager | None = None
    max_draft_tokens: int = 0
    sparse_metadata_params: DSAMetadataParams = field(default_factory=lambda: DSAMetadataParams(index_topk=2048))

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, tokens, pages = self.max_num_requests, self.max_num_tokens, self.kv_cache_block_offsets.shape[-1]
        self.req_idx_per_token = self._buffer("req_idx_per_token", tokens)
        self.slot_mapping_fp8 = self._buffer("slot_mapping_fp8", tokens, dtype=torch.int64)
        self.slot_mapping_scale = self._buffer("slot_mapping_scale", tokens, dtype=torch.int64)
        self.indexer_k_cache_block_offsets = self._buffer("indexer_k_cache_block_offsets", rows, pages)
        self.block_table = self._buffer("block_table", rows, pages)
        self.gen_kv_indptr = self._buffer("gen_kv_indptr", rows + 1, dtype=torch.int64)
        self.gen_cached_token_indptr = self._buffer("gen_cached_token_indptr", rows + 1, dtype=torch.int64)
        self.kv_lens_cuda_2d = self._buffer("kv_lens_cuda_2d", rows, 1 + self.max_draft_tokens)
        expanded = rows * (1 + self.max_draft_tokens)
        self.kv_lens_expanded_cuda = self._buffer("kv_lens_expanded_cuda", expanded)
        self.block_table_expanded = self._buffer("block_table_expanded", expanded, pages)
        self.row_req_idx_cuda = self._buffer("row_req_idx_cuda", expanded)
        self.row_kv_correction_cuda = self._buffer("row_kv_correction_cuda", expanded)
        self.row_kv_lens_cuda = self._buffer("row_kv_lens_cuda", expanded)
        self.topk_indices_buffer = self._buffer("topk_indices_buffer", tokens, self.sparse_metadata_params.index_topk)
        self.cu_seqlen_ks = self._buffer("cu_seqlen_ks", tokens)
        self.cu_seqlen_ke = self._buffer("cu_seqlen_ke", tokens)
        self.slot_mapping_fp8_fullkv = self.slot_mapping_fp8[:0]
        self.slot_mapping_scale_fullkv = self.slot_mapping_scale[:0]
        self.indexer_prefill_chunks: list[IndexerPrefillChunkMetadata] | None = None
        self.dsl_split: tuple[int, int] | None = None
        self.max_gen_seq_len = 0
        self.skip_indexer_for_ctx_reqs = self.skip_indexer_for_gen_reqs = False
        self.in_mtp_draft_loop = self.indexer_schedule_stale = self._all_short = False
        self._tokens = torch.arange(tokens, device=self.device)
        if self.draft_kv_cache_manager is not None:
            draft_pages = self.draft_kv_cache_manager.max_blocks_per_seq
            self.draft_slot_mapping_fp8 = self._buffer("draft_slot_mapping_fp8", tokens, dtype=torch.int64)
            self.draft_slot_mapping_scale = self._buffer("draft_slot_mapping_scale", tokens, dtype=torch.int64)
            self.draft_slot_mapping_fp8_fullkv = self.draft_slot_mapping_fp8[:0]
            self.draft_slot_mapping_scale_fullkv = self.draft_slot_mapping_scale[:0]
            self.draft_indexer_k_cache_block_offsets = self._buffer(
                "draft_indexer_k_cache_block_offsets", rows, draft_pages
            )
            self.draft_block_table = self._buffer("draft_block_table", rows, draft_pages)
            self.draft_block_table_expanded = self._buffer("draft_block_table_expanded", expanded, draft_pages)
            self.draft_host_indexer_k_cache_block_offsets = self._host_buffer(rows, draft_pages)
        self._pool_cache_valid = False
        self._cached_block_table_ctx = self._cached_block_table_gen = self.block_table[:0]
        self._cached_req_idx_ctx = self._cached_req_idx_gen = self.req_idx_per_token[:0]

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step; map and slots are built on the host."""
        super().prepare()
        self._invalidate_pool_view_cache()
        self.max_gen_seq_len = max(self.seq_lens[self.num_contexts :].tolist(), default=0)
        self._prepare_skip_flags()
        self.prepare_context_indptr()
        self.prepare_for_indices_conversion()
        self.prepare_for_indexer_k_cache()
        self.prepare_for_spec_decode()
        self._update_gen_indptr()
        self._update_indexer_kv_lens()
        self.prepare_dense_topk_indices()
        Indexer.prepare(self)

    @property
    def expands_generations(self) -> bool:
        """Whether the kernel for the logits takes one query row per sequence (upstream: on Hopper, from two drafts).

        Where generations differ in their rows it takes each row for a sequence of its own, which is another way.
        """
        return self.max_draft_tokens > 1 and self.ragged_verify_lens is None

    def _prepare_skip_flags(self) -> None:
        """Decide, by the host's lengths, whether all contexts, and all generations, are short.

        A sequence is while the indexer would select all of its tokens to the end of the draft loop. That is one
        token less than upstream has, as the tracer's drafter counts the token after its position too.
        """
        params = self.sparse_metadata_params
        enabled = params.skip_indexer_for_short_seqs and not self.is_cuda_graph
        lens, contexts = self.kv_lens[: self.num_seqs].tolist(), self.num_contexts
        flags = (bool(part) and max(part) < params.index_topk for part in (lens[:contexts], lens[contexts:]))
        self.skip_indexer_for_ctx_reqs, self.skip_indexer_for_gen_reqs = (enabled and flag for flag in flags)
        self._all_short = enabled and max(lens) < params.index_topk

    def prepare_for_indices_conversion(self) -> None:
        """Name the row of each token."""
        rows = torch.repeat_interleave(torch.arange(self.num_seqs, dtype=torch.int32), self.seq_lens)
        self.host_req_idx_per_token = maybe_pin_memory(rows, self.device)
        copy_to_device("req_idx_per_token", self.req_idx_per_token[: self.num_tokens], self.host_req_idx_per_token)

    def prepare_for_indexer_k_cache(self) -> None:
        """Write the tables of pages, the indexer's and the one that selected positions are read through.

        The latter covers what the draft loop appends too: upstream's ends with the target's lengths, and a draft
        forward that enters a new page finds none there.
        """
        assert self.request_ids is not None, "prepare: request_ids is not set"
        n, manager = self.num_seqs, self.kv_cache_manager
        pages = manager.get_pool_block_indices(self.request_ids)
        self.host_indexer_k_cache_block_offsets = pages * manager.indexer_k_cache_page_scale
        copy_to_device(
            "indexer_k_cache_block_offsets",
            self.indexer_k_cache_block_offsets[:n],
            maybe_pin_memory(self.host_indexer_k_cache_block_offsets, self.device),
        )
        used = (self.kv_lens[:n] + manager.tokens_per_block - 1) // manager.tokens_per_block
        table = torch.where(torch.arange(pages.shape[1]) < used.unsqueeze(1), pages, -1)
        copy_to_device("block_table", self.block_table[:n], maybe_pin_memory(table, self.device))

    def prepare_for_spec_decode(self) -> None:
        """Tell the indexer's kernel of the rows of each generation.

        Where generations differ in their rows it is told each row's owner, where it takes a query row per sequence the
        pages of each row, and where it splits rows into which parts.
        """
        self._prepare_verify_rows()
        params, generations, next_n = self.sparse_metadata_params, self.num_generations, 1 + self.max_draft_tokens
        if generations and self.expands_generations:
            table = self.host_indexer_k_cache_block_offsets[self.num_contexts :].repeat_interleave(next_n, 0)
            table = maybe_pin_memory(table, self.device)
            copy_to_device("block_table_expanded", self.block_table_expanded[: len(table)], table)
        if generations and params.use_cute_dsl_topk:
            atoms = FP4_ATOMS if self.kv_cache_manager.use_fp4 else FP8_ATOMS
            longest = max(self.kv_lens_runtime[self.num_contexts :].tolist())
            self.dsl_split = pick_split(next_n, atoms, generations, longest, params.num_sms)

    def _prepare_verify_rows(self) -> None:
        """Say of each row of the generations whose it is, and how many of its request follow it."""
        lens = self.ragged_verify_lens
        if not lens:
            return
        owners = [self.num_contexts + i for i, count in enumerate(lens) for _ in range(count)]
        corrections = [row - count for count in lens for row in range(1, count + 1)]
        for name, values in (("row_req_idx_cuda", owners), ("row_kv_correction_cuda", corrections)):
            copy_to_device(name, getattr(self, name)[: len(values)], host_tensor(values, self.device))

    def on_update_kv_lens(self, skip_indexer_schedule: bool = False) -> None:
        """Derive anew, on the device, all that depends on lengths and layout (PR #16925).

        skip_indexer_schedule  but for what only a selection reads
        """
        super().on_update_kv_lens()
        self._invalidate_pool_view_cache()
        if self.num_tokens:
            self._update_req_idx_per_token()
            if self.kv_cache_manager is not None:
                self._update_slot_mappings()
            self.prepare_dense_topk_indices()
        if self.num_generations:
            self._update_gen_indptr()
            self.indexer_schedule_stale = skip_indexer_schedule
            if not skip_indexer_schedule:
                self._update_indexer_kv_lens()

    def update_for_spec_dec(self) -> None:
        """Follow a draft loop: what it changed, and one row per generation from now on.

        Contexts that became generations count for the flag of those (upstream keeps the one of ``prepare``, and a
        long context then attends to its first ``index_topk`` tokens). While the drafter's layers share what the
        first forward of the loop selected, what only a selection reads is left out of date.
        """
        super().update_for_spec_dec()
        self.max_gen_seq_len = 1
        if not self.num_contexts:
            self.skip_indexer_for_ctx_reqs, self.skip_indexer_for_gen_reqs = False, self._all_short
        self.on_update_kv_lens(skip_indexer_schedule=self.in_mtp_draft_loop)

    def restore_after_draft_forward(self, saved: dict[str, Any]) -> None:
        """Refer to what ``prepare_for_draft_forward`` returned."""
        super().restore_after_draft_forward(saved)
        self._invalidate_pool_view_cache()

    def _fields_with_draft_twins(self) -> tuple[str, ...]:
        return (*super()._fields_with_draft_twins(), *_CACHE_FIELDS)

    def _refer_to_draft_twins(self) -> None:
        """Also write what they hold: slots and tables, or slots alone while a graph is captured.

        The runner of a graph writes the tables before each replay. The slots are those of the target's layout; a
        drafter that feeds other rows tells the hooks. They follow the device's lengths, in a graph too: the host's run
        ahead with the overlap scheduler, and upstream, which goes by them, has the first draft forward write behind its
        place.
        """
        super()._refer_to_draft_twins()
        self._invalidate_pool_view_cache()
        if not is_current_stream_capturing():
            self.prepare_for_indexer_k_cache()
            self.prepare_for_spec_decode()
            if self.num_contexts:
                Indexer.recompute_full_slot_mappings(self, Indexer.params(self))
        self._update_slot_mappings()

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

    def _update_indexer_kv_lens(self) -> None:
        """Keys of each generation, in the forms that the kernels for the logits take."""
        contexts, n = self.num_contexts, self.num_seqs
        keys = self.kv_lens_cuda[contexts:n] // self.sparse_metadata_params.indexer_compress_ratio
        self.kv_lens_cuda_2d[: n - contexts].copy_(keys.unsqueeze(1))
        self._update_row_kv_lens()
        if self.expands_generations:
            repeated = keys.repeat_interleave(1 + self.max_draft_tokens)
            self.kv_lens_expanded_cuda[: len(repeated)].copy_(repeated)

    def _update_row_kv_lens(self) -> None:
        """Count the KV length of each row of the generations back from that of its request."""
        if self.ragged_verify_lens:
            rows = sum(self.ragged_verify_lens)
            of_requests = self.kv_lens_cuda.index_select(0, self.row_req_idx_cuda[:rows])
            self.row_kv_lens_cuda[:rows].copy_(of_requests + self.row_kv_correction_cuda[:rows])

    @property
    def reads_verify_rows(self) -> bool:
        """Whether the generations of this forward are read row by row, as they differ in how many they feed.

        A draft forward of one row for each is not; neither is a target's of one row each, for which it is the same.
        """
        return bool(self.ragged_verify_lens) and int(self.seq_lens[self.num_contexts :].max()) > 1

    def prepare_dense_topk_indices(self) -> None:
        """Name the tokens that rows of short sequences attend to: all up to their own place."""
        contexts, tokens = self.num_ctx_tokens, self.num_tokens
        begin = 0 if self.skip_indexer_for_ctx_reqs else contexts
        end = tokens if self.skip_indexer_for_gen_reqs else contexts
        if begin < end:
            kv_lens, width = self.kv_lens_cuda[: self.num_seqs], self.topk_indices_buffer.shape[1]
            rows = dense_topk(kv_lens, self.seq_lens_cuda, tokens, width)
            self.topk_indices_buffer[begin:end].copy_(rows[begin:end])

    def _expanded_rows(self) -> int:
        """Rows of each generation in this forward if they are read from the repeated lengths, else 0."""
        next_n = (self.num_tokens - self.num_ctx_tokens) // max(self.num_generations, 1)
        return next_n if self.expands_generations and 1 < next_n <= 1 + self.max_draft_tokens else 0

    @property
    def reads_expanded_rows(self) -> bool:
        """Whether the generations of this forward are read from what is repeated for each of their rows."""
        return self._expanded_rows() > 0

    def indexer_context_lens(self) -> Tensor:
        """Keys that the kernel may select from for each token of the contexts: int32 [num_ctx_tokens]."""
        tokens = self.num_ctx_tokens
        return self.cu_seqlen_ke[:tokens] - self.cu_seqlen_ks[:tokens]

    def indexer_kv_lens(self) -> Tensor:
        """Keys that the kernel is told of each row of the generations: int32 [num_tokens - num_ctx_tokens]."""
        generations, rows = self.num_generations, self._expanded_rows()
        if rows:
            repeated = self.kv_lens_expanded_cuda.view(-1, 1 + self.max_draft_tokens)
            return repeated[:generations, :rows].flatten()
        next_n = (self.num_tokens - self.num_ctx_tokens) // max(generations, 1)
        return self.kv_lens_cuda_2d[:generations, :1].expand(-1, next_n).flatten()

    def indexer_block_table(self) -> Tensor:
        """Pages of each sequence in the indexer's pools, where the kernels find them: int32 [n, pages]."""
        contexts, table = self.num_contexts, self.indexer_k_cache_block_offsets
        if self._expanded_rows():
            repeated = self.block_table_expanded[:: 1 + self.max_draft_tokens]
            return torch.cat([table[:contexts], repeated[: self.num_generations]])
        return table[: self.num_seqs]

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
        self._cached_req_idx_gen = self.req_idx_per_token[ctx_tokens : self.num_tokens] - contexts
        self._pool_cache_valid = True
