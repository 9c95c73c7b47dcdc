"""The backend's part of the attention metadata, derived from upstream's real ``AttentionMetadata``.

Upstream's ``TrtllmAttentionMetadata`` needs compiled operators. What the workers touch of it (lengths, request
types, block tables, speculative-decoding switches) is added here, through the real base's constructor, setters
and ``get_empty``, so that an object can never be in a state that the real base would not reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def metadata_class(base: Any) -> type:
    """A metadata class of the dense TRTLLM backend below ``base``, the real ``AttentionMetadata``."""

    @dataclass(kw_only=True)
    class TrtllmAttentionMetadata(base):  # type: ignore[misc]
        """Buffers are ``max_num_sequences`` (S) rows long and keep their address.

        kv_lens_cuda, prompt_lens_cuda   device int32 [S]
        kv_lens, prompt_lens_cpu, host_request_types   host int32 [S]; ``kv_lens`` includes extra tokens
        host_total_kv_lens               host int32 [2]: sums over contexts and over generations
        kv_cache_block_offsets           device int32 [pools, S, 2, max_blocks_per_seq]
        draft_kv_cache_block_offsets     the same of the draft manager, None without one
        """

        max_num_sequences: int | None = None
        use_spec_decoding: bool = False
        is_spec_decoding_enabled: bool = False
        spec_decoding_packed_mask: torch.Tensor | None = None
        spec_decoding_position_offsets: torch.Tensor | None = None
        spec_decoding_position_offsets_cpp: torch.Tensor | None = None
        spec_decoding_generation_lengths: torch.Tensor | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.max_num_sequences = rows = self.max_num_sequences or self.max_num_requests
            self.prompt_lens_cuda = self._device_buffer("prompt_lens_cuda", rows)
            self.kv_lens_cuda = self._device_buffer("kv_lens_cuda", rows)
            self.prompt_lens_cpu, self.kv_lens, self.host_request_types = (
                torch.zeros(rows, dtype=torch.int32) for _ in range(3)
            )
            self.host_total_kv_lens = torch.zeros(2, dtype=torch.int32)
            self.kv_cache_block_offsets = self._block_table("kv_cache_block_offsets", self.kv_cache_manager)
            self.host_kv_cache_block_offsets = getattr(self.kv_cache_manager, "host_kv_cache_block_offsets", None)
            self.draft_kv_cache_block_offsets = self._block_table(
                "draft_kv_cache_block_offsets", self.draft_kv_cache_manager
            )

        def _device_buffer(self, name: str, *shape: int) -> torch.Tensor:
            buffer: torch.Tensor = self.get_empty(self.cuda_graph_buffers, shape, torch.int32, name, self.is_cuda_graph)
            return buffer

        def _block_table(self, name: str, manager: Any) -> torch.Tensor | None:
            if manager is None:
                return None
            rows = self.max_num_sequences or self.max_num_requests
            return self._device_buffer(name, manager.num_pools, rows, 2, manager.max_blocks_per_seq)

        def prepare(self) -> None:
            """Derive lengths, types and block tables from what the engine has assigned for the step."""
            super().prepare()
            n, contexts = self.num_seqs, self.num_contexts
            prompts = torch.tensor(self.prompt_lens, dtype=torch.int32)
            self.prompt_lens_cpu[:n] = prompts
            self.prompt_lens_cuda[:n].copy_(prompts, non_blocking=True)
            cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
            kv = cached + self.seq_lens_kv
            self.kv_lens[:n] = kv + self.kv_cache_params.num_extra_kv_tokens
            self.kv_lens_cuda[:n].copy_(kv, non_blocking=True)
            self.kv_lens_runtime = kv
            self.host_total_kv_lens[0] = kv[:contexts].sum()
            self.host_total_kv_lens[1] = kv[contexts:].sum()
            self.host_request_types[:contexts] = 0
            self.host_request_types[contexts:n] = 1
            self._copy_block_offsets(n, contexts)

        def _copy_block_offsets(self, n: int, contexts: int) -> None:
            manager, draft = self.kv_cache_manager, self.draft_kv_cache_manager
            manager.copy_batch_block_offsets(self.kv_cache_block_offsets, self.request_ids, 1, contexts, n)
            longest = int(self.kv_lens[:n].max())
            assert longest <= manager.max_seq_len, f"kv length {longest} exceeds max_seq_len {manager.max_seq_len}"
            if draft is not None:
                draft.copy_batch_block_offsets(self.draft_kv_cache_block_offsets, self.request_ids, 1, contexts, n)

        def update_spec_dec_param(self, batch_size: int, is_spec_decoding_enabled: bool, *_: Any, **__: Any) -> None:
            """Switch speculative decoding on or off for the step; the engine calls it before ``prepare``."""
            self.is_spec_decoding_enabled = self.use_spec_decoding = is_spec_decoding_enabled

    return TrtllmAttentionMetadata
