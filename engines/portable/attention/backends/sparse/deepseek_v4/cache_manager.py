"""The KV cache of DeepSeek-V4: pages of plain tokens, of compressed ones for each ratio, and of an indexer's keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2


class DeepseekV4CacheManager(DSACacheManager):
    """Pages of tokens as its base has them; a page also holds what the same tokens are compressed to.

    compress_ratios  1, that of the layers with an indexer and, if any, that of the layers without; tokens of a page are
                     a multiple of each
    """

    def __init__(self, *, compress_ratios: tuple[int, ...], **options: Any) -> None:
        super().__init__(num_other_pools=len(compress_ratios) - 1, **options)
        self.compress_ratios = compress_ratios
        # Behind the layers come their indexers' pools.
        self._compressed = dict(zip(compress_ratios[1:], self._layers[2 * self.num_layers :]))

    @property
    def index_tokens_per_block(self) -> int:
        """Keys in a page of the indexer's cache: one for each compressed token of the second ratio."""
        return self.compressed_block_size(self.compress_ratios[1])

    def compressed_block_size(self, ratio: int) -> int:
        """Compressed tokens of a page (upstream: ``compressed_block_sizes``)."""
        return self.tokens_per_block // ratio

    def get_compressed_buffers(self, ratio: int) -> Tensor:
        """The pool of what a ratio greater than 1 compresses: int64 [num_blocks, tokens_per_block].

        Of a page the first ``compressed_block_size(ratio)`` places are in use.
        """
        return self._compressed[ratio]


class DeepseekV4CacheManagerV2(DeepseekV4CacheManager, KVCacheManagerV2):
    """The same, managed as by ``KVCacheManagerV2``."""
