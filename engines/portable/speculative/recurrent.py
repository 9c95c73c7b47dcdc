"""Which recurrent states become live once drafts are verified."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engines.portable.pyexecutor.mamba_cache_manager import MambaHybridCacheManager


def update_mamba_states(attn_metadata: Any, num_accepted_tokens: Tensor, leaf_positions: Tensor | None = None) -> None:
    """Promote the state of the last accepted row of each generation, where the cache manager keeps such states.

    Contexts have written theirs themselves, so a batch of contexts promotes nothing. Asked in every forward: upstream's
    Eagle3 remembers what the manager of its first one was.

    num_accepted_tokens  int32 [n]
    leaf_positions       int [G]: the row in question where it does not follow from the counts, as in trees
    """
    manager = attn_metadata.kv_cache_manager
    if attn_metadata.num_generations and isinstance(manager, MambaHybridCacheManager):
        manager.update_mamba_states(
            attn_metadata=attn_metadata,
            num_accepted_tokens=num_accepted_tokens,
            state_indices=attn_metadata.mamba_metadata.state_indices,
            accepted_leaf_positions=leaf_positions,
        )
