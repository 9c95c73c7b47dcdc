"""The KV cache of a sparse backend: beside each layer's pool one for the keys of its indexer, in the same pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2
from engines.portable.pyexecutor.resource_manager import KVCacheManager

_SCALE_BYTES: Final = 4
"""Bytes of one scale: float32."""


class DSACacheManager(KVCacheManager):
    """Pages of tokens as its base has them; a page of the indexer's cache holds the keys of the same tokens.

    A key is ``index_head_dim`` numbers, in a byte of FP8 data or half a byte of FP4 each, and a scale for each
    ``quant_block_size`` of them. A page has the data of all of its tokens, then their scales; both are named by byte
    offsets into the layer's pool. The tracer keeps a token's entry where its data begins, so a pool is int64
    [num_blocks, tokens_per_block] here.
    """

    index_head_dim = 128
    quant_block_size = 128
    indexer_k_cache_page_scale = 1
    """Pages of the indexer's pool per page of the main one."""

    def __init__(self, *, num_layers: int, use_fp4: bool = False, num_other_pools: int = 0, **options: Any) -> None:
        super().__init__(num_layers=2 * num_layers + num_other_pools, **options)
        self.num_layers = num_layers
        self.layer_offsets = {layer: i for layer, i in self.layer_offsets.items() if i < num_layers}
        self.use_fp4 = use_fp4

    @property
    def index_data_bytes(self) -> int:
        """Bytes of a token's data."""
        return self.index_head_dim // 2 if self.use_fp4 else self.index_head_dim

    @property
    def index_scale_bytes(self) -> int:
        """Bytes of a token's scales."""
        return self.index_head_dim // self.quant_block_size * _SCALE_BYTES

    @property
    def index_tokens_per_block(self) -> int:
        """Keys in a page of the indexer's cache."""
        return self.tokens_per_block

    @property
    def index_page_bytes(self) -> int:
        """Bytes of a page of the indexer's cache."""
        return self.index_tokens_per_block * (self.index_data_bytes + self.index_scale_bytes)

    def get_indexer_k_cache_buffers(self, layer_idx: int) -> Tensor:
        """The indexer's pool of a layer: int64 [num_blocks, tokens_per_block]."""
        return self._layers[self.num_layers + self.layer_offsets[layer_idx]]

    def get_indexer_slots(self, byte_offsets: Tensor) -> Tensor:
        """Which token of the pool each byte offset of data lies in, counted from its first page on: int64."""
        pages, rest = byte_offsets // self.index_page_bytes, byte_offsets % self.index_page_bytes
        return pages * self.tokens_per_block + rest // self.index_data_bytes

    def get_pool_block_indices(self, request_ids: Sequence[int]) -> Tensor:
        """Where the pages of each request lie in the pool: int32 [n, max_blocks_per_seq], host; never negative."""
        return self.get_block_table(request_ids).clamp(min=0)


class DSACacheManagerV2(DSACacheManager, KVCacheManagerV2):
    """The same, managed as by ``KVCacheManagerV2``."""
