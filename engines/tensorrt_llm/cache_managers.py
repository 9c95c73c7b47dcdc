"""The suite's KV-cache managers with what upstream's metadata reads of a manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.portable.attention.backends.sparse.dsa import cache_manager
from engines.portable.pyexecutor import resource_manager


class KVCacheManager(resource_manager.KVCacheManager):
    """One pool for the kernels; its pointers are nobody's business on the tracer model.

    host_kv_cache_block_offsets  int32 [pools, num_blocks, 2, max_blocks_per_seq], host: the table of the last batch,
                                 by row, in units of a layer's page, as the older sparse metadata decodes it
    """

    num_pools = kv_factor = head_dim = 1
    kv_cache_pool_pointers = kv_cache_pool_mapping = None

    def __init__(self, *, num_layers: int, **options: Any) -> None:
        super().__init__(num_layers=num_layers, **options)
        self.num_local_layers = num_layers
        self.blocks_in_primary_pool = self.num_blocks
        # Each row owns a page at least.
        self.host_kv_cache_block_offsets = torch.zeros(
            1, self.num_blocks, 2, self.max_blocks_per_seq, dtype=torch.int32
        )

    def copy_batch_block_offsets(
        self,
        dst: Tensor,
        request_ids: Sequence[int],
        beam_width: int = 1,
        num_contexts: int | None = None,
        num_seqs: int | None = None,
    ) -> None:
        """Write the block tables of a batch to the first rows of ``dst``, and of the host table."""
        super().copy_batch_block_offsets(dst, request_ids)
        for row, request_id in enumerate(request_ids):
            pages = self.get_block_ids(request_id)[: self.max_blocks_per_seq]
            table = self.host_kv_cache_block_offsets[0, row]
            table.zero_()
            table[:, : len(pages)] = torch.tensor(pages, dtype=torch.int32) * self.num_local_layers


class DSACacheManager(KVCacheManager, cache_manager.DSACacheManager):
    """The same with a cache for the keys of the indexer."""

    use_fp4 = False

    # Upstream's callers give the number of rows first, those of the portable metadata the requests alone.
    def get_pool_block_indices(  # type: ignore[override]
        self, num_seqs: int, *, request_ids: Sequence[int], **of_beams: Any
    ) -> Tensor:
        """Pages of each of ``num_seqs`` rows: int32 [num_seqs, max_blocks_per_seq], host."""
        return super().get_pool_block_indices(request_ids)[:num_seqs]

    def get_unique_primary_pool(self) -> Tensor:
        """Pools of all layers, int64 [num_layers, num_blocks, 1, tokens_per_block]; the tracer takes its own view."""
        return self.kv_cache_pools[: self.num_local_layers].unsqueeze(2)
