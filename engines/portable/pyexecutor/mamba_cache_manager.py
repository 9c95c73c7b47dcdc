"""The cache of hybrid models: pages of attention, and a recurrent state of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.copies import copy_to_device
from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.pyexecutor.seq_slot_manager import SeqSlotManager
from scenarios.tracer import RECURRENT_START

if TYPE_CHECKING:
    from engines.portable.attention.backends.interface import AttentionMetadata


class MambaHybridCacheManager(KVCacheManager):
    """Pages as its base has them, and slots of states, which requests keep from their first chunk to their end.

    The state of a request is the live one, in its slot, whether it is in the batch or not. What a generation's rows
    write is kept by its row in the batch, until it is known which of them are accepted. All dummies have one slot,
    behind all others, which is never written (PR #13151).

    mamba_slots               who has which slot
    ssm_states                int64 [slots + 1], device: live states; the next owner finds the last one's
    intermediate_ssm_states   int64 [max_batch_size, rows of a generation], device
    """

    def __init__(self, *, max_batch_size: int, tokens_per_gen_step: int, **options: Any) -> None:
        super().__init__(**options)
        # Whoever is served owns a page at least, so there is always a slot.
        self.mamba_slots = SeqSlotManager(self.num_blocks)
        self.ssm_states = torch.full((self.num_blocks + 1,), RECURRENT_START, dtype=torch.int64, device=self.device)
        self.intermediate_ssm_states = torch.zeros(
            max_batch_size, tokens_per_gen_step, dtype=torch.int64, device=self.device
        )

    @property
    def padding_slot(self) -> int:
        """The slot of dummies."""
        return self.mamba_slots.dummy_slot

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Grant pages as the base, and a slot to each request that starts."""
        super().prepare_resources(scheduled_batch)
        self.mamba_slots.prepare_resources(scheduled_batch)

    def free_resources(self, request: LlmRequest) -> None:
        """Take everything back; does nothing for a request that owns nothing."""
        super().free_resources(request)
        self.mamba_slots.free_resources(request)

    def get_state_indices(self, request_ids: Sequence[int]) -> list[int]:
        """Slots of the rows of a batch."""
        return self.mamba_slots.get_slots(request_ids)

    def update_mamba_states(
        self,
        *,
        attn_metadata: Any,
        num_accepted_tokens: Tensor,
        state_indices: Tensor,
        accepted_leaf_positions: Tensor | None = None,
    ) -> None:
        """Make live what each generation had after its last accepted row.

        num_accepted_tokens      int32 [n]
        state_indices            int32 [n or more], device: slot of each row, of the metadata of this very forward
        accepted_leaf_positions  int [G]: that row, where it is not the one that the counts say
        """
        contexts, n = attn_metadata.num_contexts, attn_metadata.num_seqs
        leaves = num_accepted_tokens[contexts:n] - 1 if accepted_leaf_positions is None else accepted_leaf_positions
        states = self.intermediate_ssm_states[: n - contexts].gather(1, leaves.long().unsqueeze(1)).squeeze(1)
        self.write_states(state_indices[contexts:n], states)

    def write_states(self, state_indices: Tensor, states: Tensor) -> None:
        """Make states live, int64 [rows], in these slots; nothing is written for dummies."""
        slots = state_indices.long()
        kept = torch.where(slots == self.padding_slot, self.ssm_states.index_select(0, slots), states)
        self.ssm_states.index_copy_(0, slots, kept)


class MambaHybridCacheManagerV2(MambaHybridCacheManager, KVCacheManagerV2):
    """The same, with pages managed as by ``KVCacheManagerV2``."""


@dataclass(eq=False)
class Mamba2Metadata:
    """Where the states of a batch are, for recurrent layers; at addresses that graphs know.

    state_indices       int32 [max_batch_size], device: slot of each row
    has_initial_states  bool [max_batch_size], device: whether a row goes on from its live state
    """

    max_batch_size: int
    device: torch.device

    def __post_init__(self) -> None:
        self.state_indices = torch.zeros(self.max_batch_size, dtype=torch.int32, device=self.device)
        self.has_initial_states = torch.zeros(self.max_batch_size, dtype=torch.bool, device=self.device)

    def prepare(self, attn_metadata: AttentionMetadata) -> None:
        """Describe the batch that the attention metadata is prepared for. A prompt starts anew in another's slot."""
        assert attn_metadata.request_ids is not None, "prepare: request_ids is not set"
        assert attn_metadata.kv_cache_params is not None, "prepare: what is cached is not known"
        manager: Any = attn_metadata.kv_cache_manager
        slots = manager.get_state_indices(attn_metadata.request_ids)
        copy_to_device("state_indices", self.state_indices[: len(slots)], host_tensor(slots, self.device))
        begun = [int(cached > 0) for cached in attn_metadata.kv_cache_params.num_cached_tokens_per_seq]
        copy_to_device("has_initial_states", self.has_initial_states[: len(begun)], host_tensor(begun, self.device))
