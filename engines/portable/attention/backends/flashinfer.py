"""The FLASHINFER backend: page tables as arrays of running totals, and the views of them that drafters read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.page_tracer import ViewTracer
from engines.portable._utils import host_tensor, is_current_stream_capturing, maybe_pin_memory
from engines.portable.attention.backends.interface import AttentionMetadata
from engines.portable.attention.backends.trtllm import TARGET_LAYER
from engines.portable.copies import copy_to_device, to_device
from engines.portable.memory_buffer_utils import Buffers
from engines.tracer import Cache, Rows, locate


def last_page_lens(kv_lens: Tensor, page_size: int) -> Tensor:
    """Tokens in the last page of sequences of these lengths, which are at least 1."""
    return (kv_lens - 1) % page_size + 1


@dataclass(kw_only=True, eq=False, repr=False)
class FlashInferAttentionMetadata(AttentionMetadata):
    """Arrays of ``max_num_requests`` rows, int32 on the device, of which the first ``num_seqs`` are in use.

    _qo_indptr               [rows + 1]: running totals of the rows that each sequence feeds
    _paged_kv_indices        [rows * pages of a sequence]: pages of all rows, one row's after the other's
    _paged_kv_indptr_prefill, _paged_kv_indptr_decode  [rows + 1]: running totals of pages, of the contexts and of
        the generations
    _paged_kv_indptr         [n + 1]: the same over both; new in each step that has both, and not for graphs
    _paged_kv_last_page_len  [rows]: tokens in each row's last page
    _cached_token_lens       [rows]: tokens cached before the step
    _batch_indices, _positions  [max_num_tokens]: row and place of each token
    num_blocks               host: pages of each row
    planned_num_blocks       host: the same when the kernels were last planned
    num_plans                host: how often the kernels were planned, which synchronizes and cannot be captured
    draft_shares_kv          host: drafters read the target's cache through a view, and have none of their own
    enable_overlap           host: a table may have more pages than are in use, as the host counts all rows of a step
        in flight; then ``_cached_token_lens`` has what is true, from the beginning of a forward on

    The target has no ``kv_lens_cuda``: its KV lengths are the host's, or corrected by
    ``apply_spec_decode_kv_lens_offsets``. A view for a drafter has lengths on the
    device, ``_draft_kv_runtime_lens`` [rows], which with a cache of its own are its ``kv_lens_cuda``.
    """

    draft_shares_kv: bool = False
    enable_overlap: bool = False
    num_blocks: list[int] = field(default_factory=list, init=False)
    planned_num_blocks: list[int] = field(default_factory=list, init=False)
    num_plans: int = field(default=0, init=False)
    _draft_metadata: FlashInferAttentionMetadata | None = field(default=None, init=False)
    _draft_kv_runtime_lens: Tensor | None = field(default=None, init=False)
    _shares_kv: bool = field(default=False, init=False)
    _has_full_page_table: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, tokens = self.max_num_requests, self.max_num_tokens
        # Requests may share pages: together they list more than the pool has.
        pages = getattr(self.kv_cache_manager, "max_blocks_per_seq", 0)
        self._paged_kv_indices = self._buffer(self.max_num_requests * pages)
        self._paged_kv_indptr_prefill, self._paged_kv_indptr_decode = self._buffer(rows + 1), self._buffer(rows + 1)
        self._paged_kv_indptr = self._paged_kv_indptr_decode
        self._paged_kv_last_page_len, self._cached_token_lens = self._buffer(rows), self._buffer(rows)
        self._qo_indptr = self._buffer(rows + 1)
        self._batch_indices, self._positions = self._buffer(tokens), self._buffer(tokens)

    def _buffer(self, size: int) -> Tensor:
        # Not out of the pool of graphs: their sizes differ from graph to graph.
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.kv_cache_manager.tokens_per_block

    def prepare(self) -> None:
        """Fill the arrays from the fields of the step, and plan the kernels.

        Raises ``ValueError`` while a graph is captured, and ``AssertionError`` for a graph of contexts and
        generations.
        """
        super().prepare()
        assert self.kv_cache_params is not None, "prepare: kv_cache_params is not set"
        n, lens = self.num_seqs, self.seq_lens_kv
        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
        kv = cached + lens
        torch.cumsum(self.seq_lens_cuda, 0, dtype=torch.int32, out=self._qo_indptr[1 : n + 1])
        self._upload(self._cached_token_lens, cached)
        self._upload(self._paged_kv_last_page_len, last_page_lens(kv, self.page_size))
        rows = torch.repeat_interleave(torch.arange(n, dtype=torch.int32), lens)
        first = cached - (lens.cumsum(0, dtype=torch.int32) - lens)
        self._upload(self._batch_indices, rows)
        self._upload(self._positions, torch.arange(len(rows), dtype=torch.int32) + first[rows])
        self._write_page_table([-(-length // self.page_size) for length in kv.tolist()])
        self._plan()
        if self._draft_metadata is not None:
            self._draft_metadata._sync_draft_view(self)

    def _write_page_table(self, num_blocks: Sequence[int] | None) -> None:
        """Write the first ``num_blocks`` pages of each row; None: all that the manager has granted it."""
        assert self.request_ids is not None, "prepare: request_ids is not set"
        contexts, n = self.num_contexts, self.num_seqs
        ids = self.kv_cache_manager.get_batch_cache_indices(self.request_ids, num_blocks_per_seq=num_blocks)
        self.num_blocks = [len(pages) for pages in ids]
        self._has_full_page_table = num_blocks is None
        self._upload(self._paged_kv_indices, torch.tensor([p for pages in ids for p in pages], dtype=torch.int32))
        blocks = torch.tensor(self.num_blocks, dtype=torch.int32)
        self._upload(self._paged_kv_indptr_prefill[1:], blocks[:contexts].cumsum(0))
        self._upload(self._paged_kv_indptr_decode[1:], blocks[contexts:].cumsum(0))
        self._paged_kv_indptr = self._paged_kv_indptr_prefill if contexts else self._paged_kv_indptr_decode
        if 0 < contexts < n:
            assert not self.is_cuda_graph, "prepare: a graph holds contexts or generations, not both"
            totals = torch.nn.functional.pad(blocks.cumsum(0), (1, 0)).int()
            self._paged_kv_indptr = to_device("paged_kv_indptr", maybe_pin_memory(totals, self.device), self.device)

    def _upload(self, buffer: Tensor, values: Tensor) -> None:
        copy_to_device("flashinfer", buffer[: len(values)], maybe_pin_memory(values, self.device))

    def _plan(self) -> None:
        if is_current_stream_capturing():
            raise ValueError("the kernels of FlashInfer cannot be planned while a graph is captured; prepare before it")
        self.num_plans += 1
        self.planned_num_blocks = list(self.num_blocks)

    def create_cuda_graph_metadata(
        self,
        max_batch_size: int,
        sub_cross_metadata: bool = False,
        max_draft_tokens: int = 0,
        buffers: Buffers | None = None,
        encode_only: bool = False,
    ) -> Any:
        """As the base's, with buffers of just the graph's size and no view for a drafter yet."""
        if self.is_cuda_graph:
            return self
        options = sub_cross_metadata, max_draft_tokens, buffers, encode_only
        metadata = super().create_cuda_graph_metadata(max_batch_size, *options)
        metadata.max_num_requests = max_batch_size
        metadata.max_num_tokens = max_batch_size * (1 + max_draft_tokens)
        metadata._draft_metadata = metadata._draft_kv_runtime_lens = None
        metadata.__post_init__()
        return metadata

    def get_draft_metadata(self, draft_kv_cache_manager: Any = None) -> FlashInferAttentionMetadata:
        """The view of this step that a drafter reads, the same object each time; up to date with the step.

        draft_kv_cache_manager  the drafter's own cache; None: it reads the target's, one query row per sequence.
            Raises ``RuntimeError`` when the view is of the other kind.
        """
        shares = draft_kv_cache_manager is None
        if self._draft_metadata is None:
            self._draft_metadata = self._create_draft_view(draft_kv_cache_manager)
        elif self._draft_metadata._shares_kv != shares:
            has, asked = ("the target's", "its own") if not shares else ("its own", "the target's")
            raise RuntimeError(f"get_draft_metadata: the drafter's view is of {has} KV cache, not of {asked}")
        if is_current_stream_capturing():
            self._draft_metadata._rewind_draft_view(self)
        else:
            self._draft_metadata._sync_draft_view(self)
        return self._draft_metadata

    def get_shared_kv_draft_metadata(
        self, num_accepted_tokens: Tensor, num_contexts: int
    ) -> FlashInferAttentionMetadata:
        """The view with which a drafter reads the target's KV cache once drafts are accepted (int32 [n])."""
        view = self.get_draft_metadata()
        view.update_shared_kv_draft_lengths(self, num_accepted_tokens, num_contexts)
        return view

    def _create_draft_view(self, draft_kv_cache_manager: Any) -> FlashInferAttentionMetadata:
        view: Any = copy.copy(self)
        view._saved_tensors, view.cuda_graph_buffers, view._seq_lens_cuda = {}, None, None
        view.use_spec_decoding = False
        view._shares_kv = draft_kv_cache_manager is None
        if view._shares_kv:
            view.max_num_tokens = self.max_num_requests
        else:
            view.kv_cache_manager = draft_kv_cache_manager
        view.__post_init__()
        view._draft_kv_runtime_lens = view._buffer(view.max_num_requests)
        if not view._shares_kv:
            # What the draft loops of all workers advance.
            view.kv_lens_cuda = view._draft_kv_runtime_lens
        created: FlashInferAttentionMetadata = view
        return created

    def _sync_draft_view(self, target: FlashInferAttentionMetadata) -> None:
        """Bring this view up to date with the step that ``target`` is prepared for."""
        self.request_ids, self.prompt_lens = target.request_ids, target.prompt_lens
        self.kv_cache_params, self.all_rank_num_tokens = target.kv_cache_params, target.all_rank_num_tokens
        n = target.num_seqs
        if self._shares_kv:
            self.seq_lens = torch.ones(n, dtype=torch.int32)
            self.num_contexts = 0
            self._copy_page_table(target)
            self._update_draft_kv_lengths(target._kv_lens())
            if not self.is_cuda_graph:
                self._plan()
            return
        # A copy: upstream's draft loop writes into the target's own lengths when it goes on with the view.
        self.seq_lens, self.num_contexts = target.seq_lens.clone(), target.num_contexts
        self.prepare()
        # The draft loop writes into the host's lengths, while the copy from what was prepared may not have run.
        self._seq_lens = self.seq_lens.clone()
        self._copy_lengths(target)
        if not self.num_contexts:
            self._write_page_table(None)

    def _rewind_draft_view(self, target: FlashInferAttentionMetadata) -> None:
        """The same while a graph is captured: what a draft loop changed, on the device; page tables stay as they are.

        Upstream's view is not refreshed between two forwards on one preparation, and the second one drafts on from
        where the first one ended.
        """
        if self._shares_kv:
            self._update_draft_kv_lengths(target._kv_lens())
            return
        n, tokens = target.num_seqs, target.num_tokens
        self._seq_lens = target.seq_lens.clone()
        self.seq_lens_cuda.copy_(target.seq_lens_cuda)
        self.num_contexts = target.num_contexts
        self._copy_lengths(target)
        for name, count in (("_qo_indptr", n + 1), ("_batch_indices", tokens)):
            getattr(self, name)[:count].copy_(getattr(target, name)[:count])

    def _copy_lengths(self, target: FlashInferAttentionMetadata) -> None:
        """Take over the lengths that the target has on the device, where the host may know them no better."""
        n, tokens, lens = target.num_seqs, target.num_tokens, target._kv_lens()
        assert self._draft_kv_runtime_lens is not None, "only the view of a drafter follows the target"
        self._draft_kv_runtime_lens[:n].copy_(lens)
        self._paged_kv_last_page_len[:n].copy_(last_page_lens(lens, self.page_size))
        self._cached_token_lens[:n].copy_(target._cached_token_lens[:n])
        self._positions[:tokens].copy_(target._positions[:tokens])

    def _kv_lens(self) -> Tensor:
        """KV length of each row of the target, this step's tokens included: int32 [n], device."""
        return self._cached_token_lens[: self.num_seqs] + self.seq_lens_cuda

    def apply_spec_decode_kv_lens_offsets(self, offsets: Tensor, num_generations: int) -> None:
        """Move the generations by ``offsets``, int32 [num_generations], in place; pages stay as they are."""
        n, first = self.num_seqs, self.num_seqs - num_generations
        self._cached_token_lens[first:n].add_(offsets)
        self._paged_kv_last_page_len[:n].copy_(last_page_lens(self._kv_lens(), self.page_size))
        rows = self._batch_indices[self.num_ctx_tokens : self.num_tokens].long() - first
        self._positions[self.num_ctx_tokens : self.num_tokens].add_(offsets.index_select(0, rows))

    def kv_lens_of_pages(self) -> Tensor:
        """KV length of each row as the kernels have it: int32 [n], device.

        Told to them where a table has more pages than are in use, else by the pages themselves.
        """
        n = self.num_seqs
        if self._draft_kv_runtime_lens is not None:
            return self._draft_kv_runtime_lens[:n]
        if self.enable_overlap:
            return self._kv_lens()
        blocks = self._paged_kv_indptr[1 : n + 1] - self._paged_kv_indptr[:n]
        return (blocks - 1) * self.page_size + self._paged_kv_last_page_len[:n]

    def page_table(self) -> Tensor:
        """Pages of each row, -1 behind them: int32 [n, pages of the longest sequence], device."""
        n = self.num_seqs
        start, end = self._paged_kv_indptr[:n].unsqueeze(1), self._paged_kv_indptr[1 : n + 1].unsqueeze(1)
        place = start + torch.arange(self.kv_cache_manager.max_blocks_per_seq, device=self.device)
        pages = torch.take(self._paged_kv_indices, place.clamp(max=len(self._paged_kv_indices) - 1))
        return torch.where(place < end, pages, -1)

    def _copy_page_table(self, target: FlashInferAttentionMetadata) -> None:
        """Take over the target's pages, all rows as generations."""
        self.num_blocks = list(target.num_blocks)
        pages = sum(self.num_blocks)
        self._paged_kv_indices[:pages].copy_(target._paged_kv_indices[:pages])
        totals = host_tensor(self.num_blocks, self.device).cumsum(0)
        self._upload(self._paged_kv_indptr_decode[1:], totals)
        self._paged_kv_indptr = self._paged_kv_indptr_decode

    def update_shared_kv_draft_lengths(
        self, target: FlashInferAttentionMetadata, num_accepted_tokens: Tensor, num_contexts: int
    ) -> None:
        """Once drafts are accepted: contexts have all of their tokens, generations the accepted ones (int32 [n])."""
        n = target.num_seqs
        added = torch.cat([target.seq_lens_cuda[:num_contexts], num_accepted_tokens[num_contexts:]])
        self._update_draft_kv_lengths(target._cached_token_lens[:n] + added)

    def update_for_spec_dec(self) -> None:
        """Follow a draft loop on a cache of the drafter's own: lengths on the device, one row per sequence."""
        super().update_for_spec_dec()
        if self._draft_kv_runtime_lens is None or self._shares_kv:
            return
        if not self._has_full_page_table:
            self._write_page_table(None)
        self._update_draft_kv_lengths(self._draft_kv_runtime_lens[: self.num_seqs])

    def _update_draft_kv_lengths(self, lens: Tensor) -> None:
        """Take over runtime lengths, int32 [n]; with a cache of its own, a row's token is the last of them."""
        n = self.num_seqs
        assert self._draft_kv_runtime_lens is not None, "only the view of a drafter has lengths on the device"
        self._draft_kv_runtime_lens[:n].copy_(lens)
        self._paged_kv_last_page_len[:n].copy_(last_page_lens(lens, self.page_size))
        self._qo_indptr[: n + 1].copy_(torch.arange(n + 1, device=self.device))
        self._cached_token_lens[:n].copy_(lens if self._shares_kv else lens - 1)
        if not self._shares_kv:
            self._positions[:n].copy_(lens - 1)
            self._batch_indices[:n].copy_(torch.arange(n, device=self.device))


class FlashInferAttention:
    """Attention on the tracer model, by page tables: rows are written where arrays say, and see what lengths say.

    ``layer_idx`` is the drafter's layer in the KV cache. The methods are those of ``TrtllmAttention``.
    """

    def __init__(self, tracer: ViewTracer, layer_idx: int) -> None:
        self.tracer = tracer
        self.layer_idx = layer_idx

    def place(self, attn_metadata: FlashInferAttentionMetadata, num_rows: int) -> tuple[Tensor, Rows]:
        """Block table, int32 [n, pages], and rows with how far they see."""
        cu_kv = torch.nn.functional.pad(attn_metadata.kv_lens_of_pages().cumsum(0, dtype=torch.int32), (1, 0))
        rows = locate(attn_metadata._qo_indptr[: attn_metadata.num_seqs + 1], cu_kv, num_rows)
        return attn_metadata.page_table(), rows

    def target(self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows: int64 [rows]."""
        cache = Cache(attn_metadata.kv_cache_manager.get_buffers(TARGET_LAYER), table)
        self.tracer.target_cache = cache
        return self.tracer.target_at(cache, _written(attn_metadata, len(tokens)), rows, positions, tokens)

    def shifted(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with shift 1, and what their own tokens add: two of int64 [rows]."""
        draft = Cache(attn_metadata.kv_cache_manager.get_buffers(self.layer_idx), table)
        written = _written(attn_metadata, len(tokens))
        return self.tracer.shifted_at(self.tracer.target_cache, draft, written, rows, positions, tokens)

    def shared(
        self, attn_metadata: Any, positions: Tensor, tokens: Tensor, recurrent_hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of a drafter that reads the target's cache: what it chooses from, int64 [n], and what it passes on."""
        cache = Cache(attn_metadata.kv_cache_manager.get_buffers(TARGET_LAYER), attn_metadata.page_table())
        lens = attn_metadata.kv_lens_of_pages()
        return self.tracer.shared(cache, lens, positions, tokens, recurrent_hidden_states)


def _written(attn_metadata: FlashInferAttentionMetadata, num_rows: int) -> Rows:
    return Rows(attn_metadata._batch_indices[:num_rows].long(), attn_metadata._positions[:num_rows].long())
