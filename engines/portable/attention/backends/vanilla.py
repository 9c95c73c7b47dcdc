"""The VANILLA backend: each sequence in one page, lengths on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.page_tracer import HostTracer
from engines.portable._utils import host_tensor
from engines.portable.attention.backends.interface import AttentionMetadata
from engines.portable.attention.backends.trtllm import TARGET_LAYER
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.tracer import Cache, Rows, locate


@dataclass(kw_only=True, eq=False, repr=False)
class VanillaAttentionMetadata(AttentionMetadata):
    """What the step knows, and the pages of each request; attention reads the first of them.

    block_ids_per_seq  pages of each row, None without a manager

    KV lengths are those of ``kv_cache_params``, which a draft loop does not advance: no worker with a draft model
    runs on it.
    """

    block_ids_per_seq: list[list[int]] | None = field(default=None, init=False)

    def prepare(self) -> None:
        """Look up the pages of the batch."""
        super().prepare()
        assert self.request_ids is not None, "prepare: request_ids is not set"
        manager: KVCacheManager | None = self.kv_cache_manager
        self.block_ids_per_seq = None if manager is None else manager.get_batch_cache_indices(self.request_ids)


class VanillaAttention:
    """Attention on the tracer model: each sequence in the first of its pages, by lengths that the host knows."""

    def __init__(self, tracer: HostTracer, layer_idx: int) -> None:
        self.tracer = tracer

    def place(self, attn_metadata: VanillaAttentionMetadata, num_rows: int) -> tuple[Tensor, Rows]:
        """Block table, int32 [n, 1], and rows."""
        assert attn_metadata.block_ids_per_seq is not None, "attention needs a KV cache"
        assert attn_metadata.kv_cache_params is not None, "attention needs to know what is cached"
        device = attn_metadata.device
        cached = host_tensor(attn_metadata.kv_cache_params.num_cached_tokens_per_seq, device)
        query = torch.nn.functional.pad(attn_metadata.seq_lens.cumsum(0), (1, 0))
        kv = torch.nn.functional.pad((cached + attn_metadata.seq_lens).cumsum(0), (1, 0))
        table = host_tensor([pages[0] for pages in attn_metadata.block_ids_per_seq], device).unsqueeze(1)
        return table.to(device), locate(query.to(device), kv.to(device), num_rows)

    def target(self, attn_metadata: Any, table: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> Tensor:
        """Digests of target rows: int64 [rows]."""
        cache = Cache(attn_metadata.kv_cache_manager.get_buffers(TARGET_LAYER), table)
        return self.tracer.target(cache, rows, positions, tokens)
