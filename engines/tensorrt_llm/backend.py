"""What is added to upstream's real metadata classes so that an engine can drive them.

A checkout may lack ``TrtllmAttentionMetadata``, or have one that cannot be made here (``real_metadata`` tries). What
workers then touch of it (lengths, request types, block tables, speculative-decoding switches) is added here below the
real ``AttentionMetadata``, through its own constructor, setters and ``get_empty``, so that an object can never be in a
state that the real base would not reach. Buffers and equations are those of ``engines.portable``'s class of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from engines.portable.attention.backends.trtllm import linear_packed_mask


@lru_cache(maxsize=64)
def linear_tables(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and mask of linear drafts, the same row for each request; one pair for the whole process.

    position offsets  int32 [rows, width]: 0, 1, ...
    packed mask       int32 [rows, width, ceil(width / 32)], see ``linear_packed_mask``
    """
    # Made once in a process, so its calls are no fault sites: a second run would not pass them.
    with torch._C.DisableTorchFunction():
        offsets = torch.arange(width, dtype=torch.int32)
        return offsets.repeat(rows, 1).to(device), linear_packed_mask(width).repeat(rows, 1, 1).to(device)


def attention_metadata_class(base: Any) -> type:
    """Metadata of the dense TRTLLM backend below ``base``, the real ``AttentionMetadata``."""
    return _with_trees(_with_linear_drafts(_with_schedules(_with_lengths(_with_block_tables(base)))))


def _with_block_tables(base: Any) -> type:
    class WithBlockTables(base):
        """Block tables, and the buffers of the device, ``max_num_requests`` rows long, that keep their address.

        draft_kv_cache_block_offsets  block table of the draft manager, None without one
        """

        def __post_init__(self) -> None:
            super().__post_init__()
            self.kv_cache_block_offsets = self._block_table("kv_cache_block_offsets", self.kv_cache_manager)
            self.host_kv_cache_block_offsets = None
            self.draft_kv_cache_block_offsets = self._block_table(
                "draft_kv_cache_block_offsets", self.draft_kv_cache_manager
            )

        @property
        def max_seq_len(self) -> int:
            """Longest KV length of a request."""
            longest: int = self.kv_cache_manager.max_seq_len
            return longest

        def _device_buffer(self, name: str, *shape: int) -> torch.Tensor:
            buffers, graph = self.cuda_graph_buffers, self.is_cuda_graph
            buffer: torch.Tensor = self.get_empty(buffers, shape, torch.int32, name, graph)
            return buffer

        def _block_table(self, name: str, manager: Any) -> torch.Tensor | None:
            if manager is None:
                return None
            return self._device_buffer(name, 1, self.max_num_requests, 2, manager.max_blocks_per_seq)

        def _copy_block_offsets(self, longest: int) -> None:
            manager, draft = self.kv_cache_manager, self.draft_kv_cache_manager
            manager.copy_batch_block_offsets(self.kv_cache_block_offsets, self.request_ids)
            assert longest <= manager.max_seq_len, f"kv length {longest} exceeds max_seq_len {manager.max_seq_len}"
            if draft is not None:
                draft.copy_batch_block_offsets(self.draft_kv_cache_block_offsets, self.request_ids)

    return WithBlockTables


def _with_lengths(base: Any) -> type:
    class WithLengths(base):
        """Lengths and types of the rows."""

        def __post_init__(self) -> None:
            super().__post_init__()
            rows = self.max_num_requests
            self.kv_lens_cuda = self._device_buffer("kv_lens_cuda", rows)
            self.prompt_lens_cuda = self._device_buffer("prompt_lens_cuda", rows)
            self.kv_lens, self.prompt_lens_cpu, self.host_request_types = (
                torch.zeros(rows, dtype=torch.int32) for _ in range(3)
            )
            self.host_total_kv_lens = torch.zeros(2, dtype=torch.int32)

        def prepare(self) -> None:
            """Derive lengths, types and block tables from what the engine has assigned for the step."""
            super().prepare()
            n, contexts = self.num_seqs, self.num_contexts
            prompt_lens = torch.tensor(self.prompt_lens, dtype=torch.int32)
            self.prompt_lens_cpu[:n].copy_(prompt_lens)
            self.prompt_lens_cuda[:n].copy_(prompt_lens, non_blocking=True)
            cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
            kv = cached + self.seq_lens_kv
            self.kv_lens[:n].copy_(kv + self.kv_cache_params.num_extra_kv_tokens)
            self.kv_lens_cuda[:n].copy_(kv, non_blocking=True)
            self.kv_lens_runtime = kv
            lens = kv.tolist()
            self.host_total_kv_lens.copy_(torch.tensor([sum(lens[:contexts]), sum(lens[contexts:])], dtype=torch.int32))
            self.host_request_types[:contexts].fill_(0)
            self.host_request_types[contexts:n].fill_(1)
            self._copy_block_offsets(max(lens) + self.kv_cache_params.num_extra_kv_tokens)
            self.on_update_kv_lens()

    return WithLengths


def _with_schedules(base: Any) -> type:
    class WithSchedules(base):
        """What kernels derive from the lengths, until a hook says that these have changed."""

        _mla_scheduler_buffers: tuple[torch.Tensor, torch.Tensor] | None = None

        def on_update_kv_lens(self) -> None:
            """Forget what was derived from ``kv_lens_cuda``."""
            super().on_update_kv_lens()
            self._mla_scheduler_buffers = None

        def update_for_spec_dec(self) -> None:
            """Forget what was derived from lengths and layout."""
            super().update_for_spec_dec()
            self._mla_scheduler_buffers = None

        def mla_scheduler_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
            """Running totals of the query and of the KV lengths, from 0 on: two of int32 [n + 1], device."""
            if self._mla_scheduler_buffers is None:
                lens = self.seq_lens_cuda, self.kv_lens_cuda[: self.num_seqs]
                query, kv = (torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in lens)
                self._mla_scheduler_buffers = query, kv
            return self._mla_scheduler_buffers

    return WithSchedules


def _with_linear_drafts(base: Any) -> type:
    @dataclass(kw_only=True)
    class WithLinearDrafts(base):
        """How many rows each generation feeds, and what they see of each other: one mask for all requests."""

        is_spec_decoding_enabled: bool = False
        use_spec_decoding: bool = False
        spec_decoding_packed_mask: torch.Tensor | None = None
        spec_decoding_position_offsets: torch.Tensor | None = None
        spec_decoding_position_offsets_cpp: torch.Tensor | None = None
        spec_decoding_generation_lengths: torch.Tensor | None = None

        def update_spec_dec_param(
            self, is_spec_decoding_enabled: bool, spec_metadata: Any, batch_size: int = 0, num_contexts: int = 0
        ) -> None:
            """Tell the kernels about the drafts of the step."""
            self.is_spec_decoding_enabled = self.use_spec_decoding = is_spec_decoding_enabled
            rows, width = self.max_num_requests, spec_metadata.runtime_tokens_per_gen_step
            if self.spec_decoding_generation_lengths is None:
                self.spec_decoding_generation_lengths = self._device_buffer("generation_lengths", rows)
            self.spec_decoding_generation_lengths.fill_(width)
            offsets, mask = linear_tables(rows, width, self.spec_decoding_generation_lengths.device)
            self.spec_decoding_position_offsets = self.spec_decoding_position_offsets_cpp = offsets
            self.spec_decoding_packed_mask = mask

    return WithLinearDrafts


def _with_trees(base: Any) -> type:
    @dataclass(kw_only=True)
    class TrtllmAttentionMetadata(base):
        """With trees of drafts, from the slots of the batch's generations.

        spec_tree_width  most rows of a sequence that masks speak of; 0 for linear drafts. The buffers of trees are laid
            out as the portable class has them, and shared by the copies that belong to graphs
        slot_storage  where the trees of requests are kept
        """

        spec_tree_width: int = 0
        slot_storage: Any = None

        def __post_init__(self) -> None:
            super().__post_init__()
            width, rows = self.spec_tree_width, self.max_num_requests
            if width and not self.is_cuda_graph:
                packed = self._device_buffer("packed_mask", rows, width, -(-width // 32))
                offsets = self._device_buffer("position_offsets", rows * width)
                lengths = self._device_buffer("generation_lengths", rows)
                self._tree_buffers = packed, offsets, lengths
                self.spec_decoding_packed_mask, self.spec_decoding_position_offsets = packed, offsets
                self.spec_decoding_generation_lengths = lengths
                self.update_position_offsets_for_cpp(width)

        def mla_scheduler_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
            # The worker of trees calls no hook between its first change of lengths and its first draft forward. Kernels
            # that read the lengths themselves, which is all that trees need, do not notice.
            if self.spec_tree_width:
                self._mla_scheduler_buffers = None
            buffers: tuple[torch.Tensor, torch.Tensor] = super().mla_scheduler_buffers()
            return buffers

        def update_spec_dec_param(
            self, is_spec_decoding_enabled: bool, spec_metadata: Any, batch_size: int = 0, num_contexts: int = 0
        ) -> None:
            if not self.spec_tree_width:
                super().update_spec_dec_param(is_spec_decoding_enabled, spec_metadata)
                return
            self.is_spec_decoding_enabled = self.use_spec_decoding = is_spec_decoding_enabled
            self._lay_out_trees(self.slot_storage.all_ids_buf[num_contexts:batch_size])

        def _lay_out_trees(self, slots: torch.Tensor) -> None:
            """Masks, offsets and lengths of the trees in ``slots``, int64 [G]."""
            storage, packed, offsets, lengths = self.slot_storage, *self._tree_buffers
            masks, depths = storage.packed_mask.index_select(0, slots), storage.position_offsets.index_select(0, slots)
            sequences, nodes, words = masks.shape
            packed[:sequences].zero_()
            packed[:sequences, :nodes, :words].copy_(masks)
            offsets[: depths.numel()].copy_(depths.flatten())
            lengths[:sequences].fill_(nodes)

        def update_position_offsets_for_cpp(self, query_len: int) -> None:
            """Show the kernels the offsets, which lie as they read them."""
            self.spec_decoding_position_offsets_cpp = self.spec_decoding_position_offsets

    return TrtllmAttentionMetadata


def spec_metadata_class(base: Any, no_token: int) -> type:
    """The real metadata class of a worker with the methods that the suite's model engine calls.

    A version that has methods for the same purpose gives them other names or other arguments, so they are not called.

    no_token  upstream's ``INVALID_PROMPT_LOOKAHEAD_TOKEN``
    """

    class DrivenSpecMetadata(base):
        """Upstream's class, called as the portable engine's."""

        def populate_context_prompt_lookahead(self, context_requests: Sequence[Any]) -> None:
            """Upload the prompt token that follows each context's chunk, if this version has a place for it.

            Upstream's method of this name is told tokens, not requests.
            """
            tokens = getattr(self, "context_prompt_lookahead_tokens", None)
            if tokens is not None and context_requests:
                known = [r.prompt_lookahead_token for r in context_requests]
                values = torch.tensor([no_token if t is None else t for t in known], dtype=torch.int32)
                tokens[: len(values)].copy_(values, non_blocking=True)

        def write_padding_draft_probs(self, num_contexts: int, num_drafts: Sequence[int], draft_len: int) -> None:
            """Nothing: upstream's workers are driven without rejection sampling."""

    return DrivenSpecMetadata
