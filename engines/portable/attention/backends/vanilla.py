"""The VANILLA backend: each sequence in one page, lengths on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.portable.attention.backends.interface import AttentionMetadata
from engines.portable.pyexecutor.resource_manager import KVCacheManager


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
        assert self.request_ids is not None, "prepare: request_ids is not set"
        manager: KVCacheManager | None = self.kv_cache_manager
        self.block_ids_per_seq = None if manager is None else manager.get_batch_cache_indices(self.request_ids)
