"""``DeepseekV4TrtllmAttentionMetadata``: windows of plain tokens, and what is compressed and read beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.portable._utils import is_current_stream_capturing, maybe_pin_memory
from engines.portable.attention.backends.sparse.deepseek_v4.cache_manager import DeepseekV4CacheManager
from engines.portable.attention.backends.sparse.dsa.indexer import Indexer, slots_of
from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.copies import copy_to_device


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@dataclass(kw_only=True, eq=False, repr=False)
class DeepseekV4TrtllmAttentionMetadata(DSAtrtllmAttentionMetadata):
    """Adds, on the device, what follows from lengths and layout; ``{r}`` has a buffer for each compress ratio.

    cached_token_lens        int32 [rows]: KV length of each row without this forward's tokens
    cu_seq_lens              int32 [rows + 1]: running totals of the rows' queries
    new_comp_kv_lens {r}, compressed_kv_lens {r}, past_kv_lens {r}  int32 [rows]: compressed tokens that each row adds,
        has then, and had before
    cu_new_comp_kv {r}       int32 [rows + 1]: running totals of the added ones
    compressed_position_ids {r > 1}, compressed_mask {r > 1}  int32, bool [max_num_tokens]: first token of each added
        one, row by row, and whether there is such; behind the last one that one is repeated
    swa_local_indices        int32 [max_num_tokens, window_size]: KV indices of the window of each token, then -1
    compressed_local_indices  int32 [max_num_tokens, width]: compressed tokens of the third ratio, as each token sees
        them, then -1
    sparse_mla_topk_lens {r}  int32 [max_num_tokens]: columns, of window and compressed tokens, that the kernel reads
    sliding_block_tables     int32 [rows, pages]: pages of each row; of the drafter's cache while that is referred to
    compress_block_tables {r > 1}  int32 [rows, pages]: the same where compressed tokens are
    draft_sliding_block_tables  the twin of a separate draft KV cache, which compresses nothing

    The maps of its base are about compressed tokens where they are the indexer's; ``block_table`` is not used.
    """

    # A narrower type of the field, which keeps its place and its default.
    kv_cache_manager: DeepseekV4CacheManager = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, tokens, pages = self.max_num_requests, self.max_num_tokens, self.kv_cache_block_offsets.shape[-1]
        params = self.sparse_metadata_params
        ratios = params.compress_ratios
        self.cached_token_lens = self._buffer("cached_token_lens", rows)
        self.cu_seq_lens = self._buffer("cu_seq_lens", rows + 1)
        self.new_comp_kv_lens = self._per_ratio("new_comp_kv_lens", ratios, rows)
        self.cu_new_comp_kv = self._per_ratio("cu_new_comp_kv", ratios, rows + 1)
        self.compressed_kv_lens = self._per_ratio("compressed_kv_lens", ratios, rows)
        self.past_kv_lens = self._per_ratio("past_kv_lens", ratios, rows)
        self.compressed_position_ids = self._per_ratio("compressed_position_ids", ratios[1:], tokens)
        self.compressed_mask = self._per_ratio("compressed_mask", ratios[1:], tokens, dtype=torch.bool)
        self.swa_local_indices = self._buffer("swa_local_indices", tokens, params.window_size)
        self.sparse_mla_topk_lens = self._per_ratio("sparse_mla_topk_lens", ratios, tokens)
        self.sliding_block_tables = self._buffer("sliding_block_tables", rows, pages)
        self.compress_block_tables = self._per_ratio("compress_block_tables", ratios[1:], rows, pages)
        if len(ratios) > 2:
            width = _power_of_two(-(-self.kv_cache_manager.max_seq_len // ratios[2]))
            self.compressed_local_indices = self._buffer("compressed_local_indices", tokens, width)
        if self.draft_kv_cache_manager is not None:
            pages = self.draft_kv_cache_manager.max_blocks_per_seq
            self.draft_sliding_block_tables = self._buffer("draft_sliding_block_tables", rows, pages)

    def _per_ratio(
        self, name: str, ratios: tuple[int, ...], *shape: int, dtype: torch.dtype = torch.int32
    ) -> dict[int, Tensor]:
        return {ratio: self._buffer(f"{name}_{ratio}", *shape, dtype=dtype) for ratio in ratios}

    @property
    def expands_generations(self) -> bool:
        """Its kernel takes all rows of a generation at once."""
        return False

    def prepare(self) -> None:
        """Fill the buffers from the fields of the step; the indexer's map and slots are built on the host."""
        TrtllmAttentionMetadata.prepare(self)
        self._invalidate_pool_view_cache()
        self.max_gen_seq_len = max(self.seq_lens[self.num_contexts :].tolist(), default=0)
        self.prepare_for_indices_conversion()
        self._prepare_block_tables()
        self.prepare_for_indexer_k_cache()
        self._update_gen_indptr()
        self._update_indexer_kv_lens()
        Indexer.prepare(self)
        self._update_compressed_lens()
        self._update_local_indices()

    def _prepare_block_tables(self) -> None:
        """Write the pages of the manager that is referred to: those of the window and, if it compresses, the others."""
        assert self.request_ids is not None, "prepare: request_ids is not set"
        table = self.kv_cache_manager.get_block_table(self.request_ids).clamp(min=0)
        tables = [self.sliding_block_tables]
        if self._compresses:
            tables += self.compress_block_tables.values()
        for buffer in tables:
            copy_to_device("block_tables", buffer[: len(table)], maybe_pin_memory(table, self.device))

    def prepare_for_indexer_k_cache(self) -> None:
        """Write the table of the indexer's pages."""
        assert self.request_ids is not None, "prepare: request_ids is not set"
        self.host_indexer_k_cache_block_offsets = self.kv_cache_manager.get_pool_block_indices(self.request_ids)
        pages = maybe_pin_memory(self.host_indexer_k_cache_block_offsets, self.device)
        copy_to_device("indexer_k_cache_block_offsets", self.indexer_k_cache_block_offsets[: len(pages)], pages)

    @property
    def _compresses(self) -> bool:
        """Whether the cache that is referred to has compressed tokens: the target's, not one of the drafter's own."""
        return isinstance(self.kv_cache_manager, DeepseekV4CacheManager)

    def _update_slot_mappings(self) -> None:
        """Bring all that follows lengths and layout up to date, the indexer's slots last.

        They are slots of compressed tokens and follow from all the rest. A cache of the drafter's own has no indexer
        (upstream asks its manager for one all the same).
        """
        self._update_compressed_lens()
        self._update_local_indices()
        if self._compresses:
            tokens, ratio = self.num_tokens, self.sparse_metadata_params.indexer_compress_ratio
            slots = slots_of(
                self.compressed_position_ids[ratio][:tokens] // ratio,
                self.indexer_k_cache_block_offsets,
                self.rows_of_added(ratio),
                self.kv_cache_manager,
            )
            for buffer, values in zip((self.slot_mapping_fp8, self.slot_mapping_scale), slots):
                buffer[:tokens].copy_(values)

    def _update_compressed_lens(self) -> None:
        """Count what is cached, what is compressed already and what this forward's tokens complete."""
        n, tokens = self.num_seqs, self.num_tokens
        kv, query = self.kv_lens_cuda[:n], self.seq_lens_cuda
        torch.cumsum(query, 0, dtype=torch.int32, out=self.cu_seq_lens[1 : n + 1])
        cached = self.cached_token_lens[:n]
        cached.copy_(kv - query)
        for ratio in self.sparse_metadata_params.compress_ratios:
            past, total, new = (
                lens[ratio][:n] for lens in (self.past_kv_lens, self.compressed_kv_lens, self.new_comp_kv_lens)
            )
            past.copy_(cached // ratio)
            total.copy_(kv // ratio)
            new.copy_(total - past)
            running = self.cu_new_comp_kv[ratio]
            torch.cumsum(new, 0, dtype=torch.int32, out=running[1 : n + 1])
            if ratio == 1:
                continue
            self.compressed_mask[ratio][:tokens].copy_(self._tokens[:tokens] < running[n])
            rows = self.rows_of_added(ratio)
            place = self._added(ratio) - running.index_select(0, rows) + past.index_select(0, rows)
            self.compressed_position_ids[ratio][:tokens].copy_(place * ratio)

    def _added(self, ratio: int) -> Tensor:
        """0, 1, ... up to the last compressed token that is added, which is repeated: int32 [num_tokens]."""
        last = (self.cu_new_comp_kv[ratio][self.num_seqs] - 1).clamp(min=0)
        return torch.minimum(self._tokens[: self.num_tokens].int(), last)

    def rows_of_added(self, ratio: int) -> Tensor:
        """Row of each compressed token that is added: int64 [num_tokens]; the last one is repeated."""
        ends = self.cu_new_comp_kv[ratio][1 : self.num_seqs + 1]
        return torch.searchsorted(ends, self._added(ratio), right=True).clamp_(max=self.num_seqs - 1)

    def _update_local_indices(self) -> None:
        """Name what each token sees of its sequence: its window, and the compressed tokens up to its own place."""
        tokens, params = self.num_tokens, self.sparse_metadata_params
        rows = self.req_idx_per_token[:tokens]
        first = self.cached_token_lens[: self.num_seqs] - self.cu_seq_lens[: self.num_seqs]
        places = (self._tokens[:tokens] + first.index_select(0, rows)).unsqueeze(1)
        window = torch.arange(params.window_size, device=self.device)
        seen = (places - params.window_size + 1).clamp(min=0) + window
        self.swa_local_indices[:tokens].copy_(torch.where(seen <= places, seen, -1))
        ends = places.squeeze(1) + 1
        for layer, ratio in enumerate(params.compress_ratios):
            complete = ends // ratio
            if layer == 0:
                lens = complete.clamp(max=params.window_size)
            else:
                lens = params.window_size + (complete.clamp(max=params.index_topk) if layer == 1 else complete)
            self.sparse_mla_topk_lens[ratio][:tokens].copy_(lens)
        if len(params.compress_ratios) > 2:
            index = torch.arange(self.compressed_local_indices.shape[1], device=self.device)
            last = (ends // params.compress_ratios[2]).unsqueeze(1)
            self.compressed_local_indices[:tokens].copy_(torch.where(index < last, index, -1))

    def _fields_with_draft_twins(self) -> tuple[str, ...]:
        return (*TrtllmAttentionMetadata._fields_with_draft_twins(self), "sliding_block_tables")

    def _refer_to_draft_twins(self) -> None:
        """Also write the table, but in a graph, whose runner does it before each replay."""
        TrtllmAttentionMetadata._refer_to_draft_twins(self)
        self._invalidate_pool_view_cache()
        if not is_current_stream_capturing():
            self._prepare_block_tables()
