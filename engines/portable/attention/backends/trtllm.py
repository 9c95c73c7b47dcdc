"""The TRTLLM backend: ``TrtllmAttentionMetadata``, the buffers that its kernels read, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from engines.kernels import triton_for
from engines.portable._utils import host_tensor, maybe_pin_memory
from engines.portable.attention.backends.context_mla import ChunkPlan, plan_chunks
from engines.portable.attention.backends.interface import AttentionMetadata, AttentionRuntimeFeatures, KVCacheParams
from engines.portable.copies import copy_to_device
from engines.tracer import Cache, Masks, Rows, Tracer, TreeTracer, locate

TARGET_LAYER: Final = 0
DRAFT_LAYER: Final = 1
"""Layers of the KV cache; the layers of vanilla MTP follow from ``DRAFT_LAYER`` on."""


def linear_packed_mask(width: int) -> torch.Tensor:
    """Which of a generation's rows each of them may see, 32 to a word: int32 [width, ceil(width / 32)], host.

    Row ``i`` has bits ``0..i % 32`` of word ``i // 32``. As upstream has it, the words before that one stay 0.
    """
    row = torch.arange(width)
    mask = torch.zeros(width, -(-width // 32), dtype=torch.int64)
    mask[row, row // 32] = (2 << row % 32) - 1
    return mask.int()


@dataclass(kw_only=True, eq=False, repr=False)
class TrtllmAttentionMetadata(AttentionMetadata):
    """Per-request buffers of ``max_num_requests`` rows, of which the first ``num_seqs`` are in use.

    kv_lens_cuda            int32, device: KV length of each row, this step's tokens included
    kv_lens                 int32, host: the same plus the extra tokens, what the pages must hold
    kv_lens_runtime         int32 [n], host: the same without them, what the kernels are told; new in each step
    host_total_kv_lens      int32 [2], host: sums over contexts and over generations
    host_request_types      int32, host: 0 context, 1 generation
    prompt_lens_cpu, _cuda  int32
    kv_cache_block_offsets  int32 [pools, rows, 2, max_blocks_per_seq], device: pages of each row, for K and for V
    draft_kv_cache_block_offsets  the same of a separate draft KV cache; None without one
    mla_cu_q_rows, mla_cu_kv_seqlens  int32 [rows + 1], device: running totals of ``seq_lens_cuda`` and
        ``kv_lens_cuda``, rebuilt on demand once a hook has invalidated them (PR #12161)
    kv_lens_cuda_runtime, prompt_lens_cuda_runtime, prompt_lens_cpu_runtime, host_request_types_runtime
        views of the first n, made by ``prepare``; what is put in the place of ``kv_lens_cuda`` later they do not see
    ctx_cached_token_indptr, ctx_uncached_token_indptr, ctx_kv_indptr  int64 [rows + 1], device: running totals over
        the contexts of cached tokens, of the step's and of both, for an MLA that reads what is cached
    kv_block_ids_per_seq, block_ids_per_seq  int32 [rows, pages], device: pages of each row, and of each generation,
        0 elsewhere; with ``enable_flash_mla``
    chunk_plan              host: loops of context MLA over cached tokens; None without chunked prefill
    spec_decoding_generation_lengths  int32 [rows], device: rows that each generation feeds
    spec_decoding_position_offsets, spec_decoding_packed_mask  int32 [rows, width], [rows, width, words], device:
        where those rows lie and what they see; views of tables that all steps share, never written

    With trees of drafts (``spec_tree_width`` above 0) these are buffers that the draft loop writes too: lengths as
    above, offsets int32 [rows * spec_tree_width], one sequence's right after the other's, and the mask
    [rows, spec_tree_width, words]. The first entry is the first generation's.
    """

    max_total_draft_tokens: int = 0
    spec_tree_width: int = 0
    runtime_features: AttentionRuntimeFeatures = field(default_factory=AttentionRuntimeFeatures)
    enable_flash_mla: bool = False
    enable_context_mla_with_cached_kv: bool = False
    sm_version: int = 90
    is_spec_decoding_enabled: bool = field(default=False, init=False)
    ragged_verify_lens: list[int] | None = field(default=None, init=False)
    force_prepare_spec_dec_tree_mask: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.max_num_requests
        pages = getattr(self.kv_cache_manager, "max_blocks_per_seq", 0)
        self.kv_lens_cuda = self._buffer("kv_lens_cuda", rows)
        self.prompt_lens_cuda = self._buffer("prompt_lens_cuda", rows)
        self.kv_lens = self._host_buffer(rows)
        self.prompt_lens_cpu = self._host_buffer(rows)
        self.host_request_types = self._host_buffer(rows)
        self.host_total_kv_lens = torch.zeros(2, dtype=torch.int32)
        self.kv_lens_runtime = self.kv_lens[:0]
        self.num_ctx_cached_tokens = self.max_ctx_cached_token_len = self.max_ctx_kv_len = self.max_ctx_seq_len = 0
        self.chunk_plan: ChunkPlan | None = None
        self.kv_cache_block_offsets = self._buffer("kv_cache_block_offsets", 1, rows, 2, pages)
        draft_manager = self.draft_kv_cache_manager
        self.draft_kv_cache_block_offsets: Tensor | None = (
            self._buffer("draft_kv_cache_block_offsets", 1, rows, 2, draft_manager.max_blocks_per_seq)
            if draft_manager is not None
            else None
        )
        self.gen_token_repeats_cuda = self._buffer("gen_token_repeats_cuda", rows)
        self.mla_cu_q_rows = self._buffer("mla_cu_q_rows", rows + 1)
        self.mla_cu_kv_seqlens = self._buffer("mla_cu_kv_seqlens", rows + 1)
        self.ctx_cached_token_indptr = self._buffer("ctx_cached_token_indptr", rows + 1, dtype=torch.int64)
        self.ctx_uncached_token_indptr = self._buffer("ctx_uncached_token_indptr", rows + 1, dtype=torch.int64)
        self.ctx_kv_indptr = self._buffer("ctx_kv_indptr", rows + 1, dtype=torch.int64)
        if self.enable_flash_mla:
            self.kv_block_ids_per_seq = self._buffer("kv_block_ids_per_seq", rows, pages)
            self.block_ids_per_seq = self._buffer("block_ids_per_seq", rows, pages)
        self._mla_scheduler_buffers_valid = False
        if not self.is_cuda_graph:
            if self.is_spec_dec_dynamic_tree:
                self._create_spec_decoding_buffers(rows, self.spec_tree_width)
            else:
                self._create_spec_decoding_tables(rows, self.max_total_draft_tokens + 1)

    @property
    def is_spec_dec_dynamic_tree(self) -> bool:
        """Whether drafts are trees that differ between requests."""
        return self.spec_tree_width > 0

    def _create_spec_decoding_buffers(self, rows: int, width: int) -> None:
        """For trees; the copies that belong to graphs share them."""
        self.spec_decoding_generation_lengths = self._buffer("spec_decoding_generation_lengths", rows)
        self.spec_decoding_position_offsets = self._buffer("spec_decoding_position_offsets", rows * width)
        self.spec_decoding_packed_mask = self._buffer("spec_decoding_packed_mask", rows, width, -(-width // 32))

    def _create_spec_decoding_tables(self, rows: int, widest: int) -> None:
        """For the object of eager steps; the copies that belong to graphs share its tables."""
        self._linear_offsets = torch.arange(widest, dtype=torch.int32, device=self.device).expand(rows, -1)
        self._linear_mask = linear_packed_mask(widest).to(self.device).expand(rows, -1, -1)
        self.spec_decoding_generation_lengths = self._buffer("spec_decoding_generation_lengths", rows)
        self.spec_decoding_position_offsets = self._linear_offsets[:, :0]
        self.spec_decoding_packed_mask = self._linear_mask[:, :0]

    def _buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.get_empty(shape, dtype, name)

    def _host_buffer(self, *shape: int) -> torch.Tensor:
        return maybe_pin_memory(torch.zeros(shape, dtype=torch.int32), self.device)

    def prepare(self) -> None:
        """Fill the buffers from ``seq_lens``, ``prompt_lens``, ``request_ids`` and ``kv_cache_params``.

        Raises ``AssertionError`` when a KV length, extra tokens included, exceeds the manager's ``max_seq_len``.
        """
        super().prepare()
        if self.kv_cache_manager is None:
            self.kv_cache_params, self.prompt_lens = KVCacheParams(use_cache=False), self.context_lens.tolist()
        assert self.prompt_lens is not None, "prepare: prompt_lens is not set"
        assert self.kv_cache_params is not None, "prepare: kv_cache_params is not set"
        prompt_lens = host_tensor(self.prompt_lens, self.device)
        self.prompt_lens_cpu[: len(prompt_lens)].copy_(prompt_lens)
        copy_to_device("prompt_lens_cuda", self.prompt_lens_cuda[: len(prompt_lens)], prompt_lens)
        self._prepare_kv_lens(self.kv_cache_params)
        self._prepare_verify_widths()
        if self.kv_cache_manager is not None:
            self._prepare_tables(self.kv_cache_params.num_extra_kv_tokens)
        self._bind_runtime_views()
        self._mla_scheduler_buffers_valid = False

    def _prepare_kv_lens(self, params: KVCacheParams) -> None:
        """Lengths are what is cached and what the step adds; without a cache the latter alone."""
        n, contexts = self.num_seqs, self.num_contexts
        kv = self.seq_lens_kv
        if params.use_cache:
            kv = maybe_pin_memory(torch.tensor(params.num_cached_tokens_per_seq, dtype=torch.int32) + kv, self.device)
        self.kv_lens[:n].copy_(kv + params.num_extra_kv_tokens)
        copy_to_device("kv_lens_cuda", self.kv_lens_cuda[:n], kv)
        self.kv_lens_runtime = kv
        lens = kv.tolist()
        self.host_total_kv_lens.copy_(torch.tensor([sum(lens[:contexts]), sum(lens[contexts:])], dtype=torch.int32))
        self.host_request_types[:contexts].fill_(0)
        self.host_request_types[contexts:n].fill_(1)
        if self.enable_context_mla_with_cached_kv:
            self.prepare_context_mla_with_cached_kv()

    def _prepare_verify_widths(self) -> None:
        """Tell the kernels how many rows each generation feeds, where ``ragged_verify_lens`` has a number for each."""
        if self.ragged_verify_lens is None:
            return
        widths = self.gen_token_repeats_cuda[: len(self.ragged_verify_lens)]
        copy_to_device("gen_token_repeats_cuda", widths, host_tensor(self.ragged_verify_lens, self.device))
        self.spec_decoding_generation_lengths[: len(widths)].copy_(widths)

    @property
    def verify_widths(self) -> Tensor | None:
        """Rows of each generation in the target: int32 [num_generations], device; None where all have the same."""
        lens = self.ragged_verify_lens
        return None if lens is None else self.gen_token_repeats_cuda[: len(lens)]

    def _prepare_tables(self, num_extra_kv_tokens: int) -> None:
        assert self.request_ids is not None, "prepare: request_ids is not set"
        if self.enable_flash_mla:
            self.prepare_flash_mla()
        self.kv_cache_manager.copy_batch_block_offsets(self.kv_cache_block_offsets, self.request_ids)
        if self.draft_kv_cache_manager is not None:
            assert self.draft_kv_cache_block_offsets is not None
            self.draft_kv_cache_manager.copy_batch_block_offsets(self.draft_kv_cache_block_offsets, self.request_ids)
        longest, limit = int(self.kv_lens_runtime.max()) + num_extra_kv_tokens, self.kv_cache_manager.max_seq_len
        assert longest <= limit, f"prepare: a KV length of {longest}, extra tokens included, exceeds {limit}"

    def _bind_runtime_views(self) -> None:
        n = self.num_seqs
        self.kv_lens_cuda_runtime = self.kv_lens_cuda[:n]
        self.prompt_lens_cuda_runtime = self.prompt_lens_cuda[:n]
        self.prompt_lens_cpu_runtime = self.prompt_lens_cpu[:n]
        self.host_request_types_runtime = self.host_request_types[:n]

    def prepare_context_indptr(self) -> None:
        """Running totals over the contexts: of cached tokens, of the step's tokens and of both."""
        assert self.kv_cache_params is not None, "prepare: kv_cache_params is not set"
        contexts = self.num_contexts
        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq[:contexts], dtype=torch.int64)
        new = self.seq_lens_kv[:contexts].long()
        totals = {"ctx_cached_token_indptr": cached, "ctx_uncached_token_indptr": new, "ctx_kv_indptr": cached + new}
        for name, lens in totals.items():
            values = maybe_pin_memory(lens.cumsum(0), self.device)
            copy_to_device(name, getattr(self, name)[1 : contexts + 1], values)

    def prepare_context_mla_with_cached_kv(self) -> None:
        """Tell an MLA that reads what is cached of the contexts how much of it there is, and in which loops to."""
        assert self.kv_cache_params is not None, "prepare: kv_cache_params is not set"
        contexts, features = self.num_contexts, self.runtime_features
        cached = self.kv_cache_params.num_cached_tokens_per_seq[:contexts]
        self.num_ctx_cached_tokens = sum(cached)
        self.max_ctx_cached_token_len = max(cached, default=0)
        self.max_ctx_kv_len = max(self.kv_lens_runtime[:contexts].tolist(), default=0)
        self.max_ctx_seq_len = max(self.context_lens.tolist(), default=0)
        self.prepare_context_indptr()
        total = features.chunk_size * features.chunked_prefill_buffer_batch_size
        self.chunk_plan = plan_chunks(cached, total) if features.chunked_prefill and contexts else None

    def prepare_flash_mla(self) -> None:
        """Write the pages of each row, and once more those of the generations from row 0 on."""
        assert self.request_ids is not None, "prepare: request_ids is not set"
        ids = self.kv_cache_manager.get_block_ids_per_seq(self.request_ids)
        for buffer, rows in ((self.kv_block_ids_per_seq, ids), (self.block_ids_per_seq, ids[self.num_contexts :])):
            buffer.zero_()
            copy_to_device("flash_mla.block_ids", buffer[: len(rows), : ids.shape[1]], rows)

    def prepare_encoder_only(self) -> None:
        """Fill what an encoder's layers read: lengths alone, contexts only. Outside graphs nothing is copied."""
        self.kv_cache_params = KVCacheParams(use_cache=False)
        self.host_total_kv_lens[0] = self.num_tokens
        self.host_request_types[: self.num_seqs].fill_(0)
        if not self.is_cuda_graph:
            self.kv_lens_runtime = self.prompt_lens_cpu_runtime = self.seq_lens
            self.kv_lens_cuda_runtime = self.prompt_lens_cuda_runtime = self.seq_lens_cuda
            self.host_request_types_runtime = self.host_request_types[: self.num_seqs]

    def bind_encoder_cuda_graph_seq_lens(self, seq_lens: Tensor, seq_lens_cuda: Tensor) -> None:
        """Let a graph of an encoder read lengths that its owner writes: int32 [n], host and device."""
        self._seq_lens, self._seq_lens_cuda = seq_lens, seq_lens_cuda
        self._num_contexts, self._num_generations = len(seq_lens), 0
        self.kv_lens_runtime = self.prompt_lens_cpu_runtime = seq_lens
        self.kv_lens_cuda_runtime = self.prompt_lens_cuda_runtime = seq_lens_cuda
        self.host_request_types_runtime = self.host_request_types[: len(seq_lens)]

    def prepare_encoder_cuda_graph_replay(self, seq_lens: Tensor, padded_num_tokens: int) -> None:
        """Write the lengths of a batch, int32 [n], in place, and count its tokens as the graph has them."""
        self.seq_lens.copy_(seq_lens)
        copy_to_device("_seq_lens_cuda", self.seq_lens_cuda, self.seq_lens)
        self._num_tokens = self._num_ctx_tokens = padded_num_tokens
        self.host_total_kv_lens[0] = padded_num_tokens

    def on_update_kv_lens(self) -> None:
        """Forget what was derived from ``kv_lens_cuda``."""
        super().on_update_kv_lens()
        self._mla_scheduler_buffers_valid = False

    def update_for_spec_dec(self) -> None:
        """Forget what was derived from lengths and layout."""
        super().update_for_spec_dec()
        self._mla_scheduler_buffers_valid = False

    def prepare_for_draft_forward(self) -> dict[str, Any]:
        """Refer to a separate draft KV cache from now on; what this object referred to is returned by field.

        To be followed by ``restore_after_draft_forward``. After a failure the object refers to what it did before.
        """
        saved = {name: getattr(self, name) for name in self._fields_with_draft_twins()}
        try:
            self._refer_to_draft_twins()
        except BaseException:  # whoever is interrupted here never learns what was saved
            self.restore_after_draft_forward(saved)
            raise
        return saved

    def restore_after_draft_forward(self, saved: dict[str, Any]) -> None:
        """Refer to what ``prepare_for_draft_forward`` returned."""
        for name, value in saved.items():
            setattr(self, name, value)

    def _fields_with_draft_twins(self) -> tuple[str, ...]:
        """What is said of one KV cache; of the drafter's own there are fields of these names with ``draft_`` before."""
        return "kv_cache_manager", "kv_cache_block_offsets"

    def _refer_to_draft_twins(self) -> None:
        for name in self._fields_with_draft_twins():
            setattr(self, name, getattr(self, f"draft_{name}"))

    def mla_scheduler_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Running totals of the query and of the KV lengths: two of int32 [n + 1], device, from 0 on."""
        n = self.num_seqs
        if not self._mla_scheduler_buffers_valid:
            queries, kv_lens = self.seq_lens_cuda, self.kv_lens_cuda[:n]
            cu_q, cu_kv = self.mla_cu_q_rows[1 : n + 1], self.mla_cu_kv_seqlens[1 : n + 1]
            if kernels := triton_for(kv_lens):
                kernels.running_totals(queries, kv_lens, cu_q, cu_kv)
            else:
                torch.cumsum(queries, 0, dtype=torch.int32, out=cu_q)
                torch.cumsum(kv_lens, 0, dtype=torch.int32, out=cu_kv)
            self._mla_scheduler_buffers_valid = True
        return self.mla_cu_q_rows[: n + 1], self.mla_cu_kv_seqlens[: n + 1]

    def update_spec_dec_param(
        self,
        is_spec_decoding_enabled: bool,
        spec_metadata: Any,
        batch_size: int = 0,
        num_contexts: int = 0,
        spec_tree_manager: Any = None,
    ) -> None:
        """Tell the kernels how many rows each generation feeds, and what they see of each other.

        Linear drafts have one mask for all requests, and so have static trees, whose ``spec_tree_manager`` has it:
        offsets int32 [1, nodes] and masks int32 [1, nodes, words]. Dynamic trees come from the slots of the batch's
        generations. The kernels of newer devices (trtllm-gen) are told of dynamic trees only.
        """
        tree = self.is_spec_dec_dynamic_tree
        is_trtllm_gen = self.sm_version >= 100 and self.sm_version not in (120, 121)
        self.is_spec_decoding_enabled = is_spec_decoding_enabled and (not is_trtllm_gen or tree)
        self.use_spec_decoding = self.is_spec_decoding_enabled
        # A layer that is not the first one rebuilds the mask too: trees differ from step to step.
        self.force_prepare_spec_dec_tree_mask = tree
        if not self.is_spec_decoding_enabled:
            return
        if tree:
            storage = spec_metadata.spec_resource_manager.slot_storage
            slots = storage.all_ids_buf[num_contexts:batch_size]
            offsets = storage.position_offsets.index_select(0, slots)
            self.set_spec_decoding_rows(storage.packed_mask.index_select(0, slots), offsets)
            return
        if spec_tree_manager is not None:
            self._set_static_tree(
                spec_tree_manager.spec_dec_packed_mask, spec_tree_manager.spec_dec_position_offsets, batch_size
            )
            return
        width = spec_metadata.runtime_tokens_per_gen_step
        self.spec_decoding_generation_lengths.fill_(width)
        self.spec_decoding_position_offsets = self._linear_offsets[:, :width]
        self.spec_decoding_packed_mask = self._linear_mask[:, :width, : -(-width // 32)]

    def _set_static_tree(self, packed_mask: Tensor, position_offsets: Tensor, batch_size: int) -> None:
        """Give every request of the batch the one tree; its buffers are allocated the first time."""
        rows, nodes, words = self.max_num_requests, *packed_mask.shape[1:]
        if self.spec_decoding_packed_mask.shape != (rows, nodes, words):
            self.spec_decoding_position_offsets = self._buffer("spec_decoding_position_offsets", rows, nodes)
            self.spec_decoding_packed_mask = self._buffer("spec_decoding_packed_mask", rows, nodes, words)
        self.spec_decoding_position_offsets[:batch_size].copy_(position_offsets)
        self.spec_decoding_packed_mask[:batch_size].copy_(packed_mask)
        self.spec_decoding_generation_lengths[:batch_size].fill_(nodes)

    def set_spec_decoding_rows(self, packed_mask: Tensor, position_offsets: Tensor) -> None:
        """Write masks, int32 [sequences, rows, words], and offsets, int32 [sequences, rows], for a forward.

        All three buffers have one stride: the rows that each sequence feeds.
        """
        sequences, rows, words = packed_mask.shape
        mask = self.spec_decoding_packed_mask[:sequences]
        mask.zero_()
        mask[:, :rows, :words].copy_(packed_mask)
        self.spec_decoding_position_offsets[: sequences * rows].copy_(position_offsets.flatten())
        self.spec_decoding_generation_lengths[:sequences].fill_(rows)


class TrtllmAttention:
    """Dense attention of target and drafter, on the tracer model: each row sees all of its sequence before it.

    All methods take the block table of the batch, int32 [n, pages], where the rows lie, their positions and tokens,
    int32 [rows], and write the rows' entries first. ``layer_idx`` is the drafter's layer in the KV cache.
    """

    def __init__(self, tracer: Tracer, layer_idx: int = DRAFT_LAYER) -> None:
        self.tracer = tracer
        self.layer_idx = layer_idx

    def place(self, attn_metadata: Any, num_rows: int) -> tuple[Tensor, Rows]:
        """Block table of the batch, and where its ``num_rows`` rows lie."""
        table = attn_metadata.kv_cache_block_offsets[0, : attn_metadata.num_seqs, 0]
        cu_q, cu_kv = attn_metadata.mla_scheduler_buffers()
        return table, locate(cu_q, cu_kv, num_rows)

    def target(self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows: int64 [rows]."""
        cache = Cache(attn_metadata.kv_cache_manager.get_buffers(TARGET_LAYER), table)
        self.tracer.target_cache = cache
        if isinstance(self.tracer, TreeTracer):
            return self.tracer.target_tree(cache, rows, _masks(attn_metadata), positions, tokens)
        return self.tracer.target(cache, rows, positions, tokens)

    def shifted(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Digests of draft rows with a shift, and what their own tokens add: two of int64 [rows].

        The shift is 1, and one more for each layer that drafts before this one.
        """
        caches = self._caches(attn_metadata, table)
        if isinstance(self.tracer, TreeTracer):
            return self.tracer.shifted_tree(*caches, rows, _masks(attn_metadata), positions, tokens)
        return self.tracer.shifted(*caches, rows, positions, tokens, self.layer_idx - TARGET_LAYER)

    def parallel(
        self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor, masks: int
    ) -> Tensor:
        """Digests of draft rows without shift, up to ``masks`` masks at their end guessed: int64 [rows]."""
        return self.tracer.parallel(*self._caches(attn_metadata, table), rows, positions, tokens, masks)

    def _caches(self, attn_metadata: Any, table: Tensor) -> tuple[Cache, Cache]:
        """What the tracer looks at while drafting: the target's cache, and the one that drafts are written to."""
        return self.tracer.target_cache, Cache(attn_metadata.kv_cache_manager.get_buffers(self.layer_idx), table)


def _masks(attn_metadata: Any) -> Masks:
    """What the kernels read of masks: nothing of contexts, nor where there is no speculation."""
    n = attn_metadata.num_seqs
    return Masks(
        first=attn_metadata.num_contexts if attn_metadata.use_spec_decoding else n,
        past=attn_metadata.kv_lens_cuda[:n] - attn_metadata.seq_lens_cuda,
        packed=attn_metadata.spec_decoding_packed_mask,
        lengths=attn_metadata.spec_decoding_generation_lengths,
    )
