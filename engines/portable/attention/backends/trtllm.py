"""The TRTLLM backend: ``TrtllmAttentionMetadata``, the buffers that its kernels read, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from engines.portable._utils import host_tensor, maybe_pin_memory
from engines.portable.attention.backends.interface import AttentionMetadata
from engines.tracer import Cache, Masks, Rows, Tracer, TreeTracer

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
    spec_decoding_generation_lengths  int32 [rows], device: rows that each generation feeds
    spec_decoding_position_offsets, spec_decoding_packed_mask  int32 [rows, width], [rows, width, words], device:
        where those rows lie and what they see; views of tables that all steps share, never written

    With trees of drafts (``spec_tree_width`` above 0) these are buffers that the draft loop writes too: lengths as
    above, offsets int32 [rows * spec_tree_width], one sequence's right after the other's, and the mask
    [rows, spec_tree_width, words]. The first entry is the first generation's.
    """

    max_total_draft_tokens: int = 0
    spec_tree_width: int = 0
    is_spec_decoding_enabled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        rows = self.max_num_requests
        pages = getattr(self.kv_cache_manager, "max_blocks_per_seq", 0)
        self.kv_lens_cuda = self._device_buffer(rows)
        self.prompt_lens_cuda = self._device_buffer(rows)
        self.kv_lens = self._host_buffer(rows)
        self.prompt_lens_cpu = self._host_buffer(rows)
        self.host_request_types = self._host_buffer(rows)
        self.host_total_kv_lens = torch.zeros(2, dtype=torch.int32)
        self.kv_lens_runtime = self.kv_lens[:0]
        self.kv_cache_block_offsets = self._device_buffer(1, rows, 2, pages)
        draft_manager = self.draft_kv_cache_manager
        self.draft_kv_cache_block_offsets: Tensor | None = (
            self._device_buffer(1, rows, 2, draft_manager.max_blocks_per_seq) if draft_manager is not None else None
        )
        self.mla_cu_q_rows = self._device_buffer(rows + 1)
        self.mla_cu_kv_seqlens = self._device_buffer(rows + 1)
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
        self.spec_decoding_generation_lengths = self._device_buffer(rows)
        self.spec_decoding_position_offsets = self._device_buffer(rows * width)
        self.spec_decoding_packed_mask = self._device_buffer(rows, width, -(-width // 32))

    def _create_spec_decoding_tables(self, rows: int, widest: int) -> None:
        """For the object of eager steps; the copies that belong to graphs share its tables."""
        self._linear_offsets = torch.arange(widest, dtype=torch.int32, device=self.device).expand(rows, -1)
        self._linear_mask = linear_packed_mask(widest).to(self.device).expand(rows, -1, -1)
        self.spec_decoding_generation_lengths = self._device_buffer(rows)
        self.spec_decoding_position_offsets = self._linear_offsets[:, :0]
        self.spec_decoding_packed_mask = self._linear_mask[:, :0]

    def _device_buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _host_buffer(self, *shape: int) -> torch.Tensor:
        return maybe_pin_memory(torch.zeros(shape, dtype=torch.int32), self.device)

    def prepare(self) -> None:
        """Fill the buffers from ``seq_lens``, ``prompt_lens``, ``request_ids`` and ``kv_cache_params``.

        Raises ``AssertionError`` when a KV length, extra tokens included, exceeds the manager's ``max_seq_len``.
        """
        super().prepare()
        assert self.prompt_lens is not None, "prepare: prompt_lens is not set"
        assert self.request_ids is not None, "prepare: request_ids is not set"
        assert self.kv_cache_params is not None, "prepare: kv_cache_params is not set"
        n, contexts = self.num_seqs, self.num_contexts
        prompt_lens = host_tensor(self.prompt_lens, self.device)
        self.prompt_lens_cpu[:n].copy_(prompt_lens)
        self.prompt_lens_cuda[:n].copy_(prompt_lens, non_blocking=True)

        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
        kv = maybe_pin_memory(cached + self.seq_lens, self.device)
        self.kv_lens[:n].copy_(kv + self.kv_cache_params.num_extra_kv_tokens)
        self.kv_lens_cuda[:n].copy_(kv, non_blocking=True)
        self.kv_lens_runtime = kv
        lens = kv.tolist()
        self.host_total_kv_lens.copy_(torch.tensor([sum(lens[:contexts]), sum(lens[contexts:])], dtype=torch.int32))
        self.host_request_types[:contexts].fill_(0)
        self.host_request_types[contexts:n].fill_(1)

        self.kv_cache_manager.copy_batch_block_offsets(self.kv_cache_block_offsets, self.request_ids)
        if self.draft_kv_cache_manager is not None:
            assert self.draft_kv_cache_block_offsets is not None
            self.draft_kv_cache_manager.copy_batch_block_offsets(self.draft_kv_cache_block_offsets, self.request_ids)
        longest, limit = max(lens) + self.kv_cache_params.num_extra_kv_tokens, self.kv_cache_manager.max_seq_len
        assert longest <= limit, f"prepare: a KV length of {longest}, extra tokens included, exceeds {limit}"
        self._mla_scheduler_buffers_valid = False

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
        except BaseException:
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
            torch.cumsum(self.seq_lens_cuda, 0, dtype=torch.int32, out=self.mla_cu_q_rows[1 : n + 1])
            torch.cumsum(self.kv_lens_cuda[:n], 0, dtype=torch.int32, out=self.mla_cu_kv_seqlens[1 : n + 1])
            self._mla_scheduler_buffers_valid = True
        return self.mla_cu_q_rows[: n + 1], self.mla_cu_kv_seqlens[: n + 1]

    def update_spec_dec_param(
        self, is_spec_decoding_enabled: bool, spec_metadata: Any, batch_size: int = 0, num_contexts: int = 0
    ) -> None:
        """Tell the kernels how many rows each generation feeds, and what they see of each other.

        Linear drafts have one mask for all requests; trees come from the slots of the batch's generations.
        """
        self.is_spec_decoding_enabled = is_spec_decoding_enabled
        self.use_spec_decoding = is_spec_decoding_enabled
        if not is_spec_decoding_enabled:
            return
        if self.is_spec_dec_dynamic_tree:
            storage = spec_metadata.spec_resource_manager.slot_storage
            slots = storage.all_ids_buf[num_contexts:batch_size]
            offsets = storage.position_offsets.index_select(0, slots)
            self.set_spec_decoding_rows(storage.packed_mask.index_select(0, slots), offsets)
            return
        width = spec_metadata.runtime_tokens_per_gen_step
        self.spec_decoding_generation_lengths.fill_(width)
        self.spec_decoding_position_offsets = self._linear_offsets[:, :width]
        self.spec_decoding_packed_mask = self._linear_mask[:, :width, : -(-width // 32)]

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
