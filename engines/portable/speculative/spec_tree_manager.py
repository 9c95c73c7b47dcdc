"""Trees of drafts between two steps: who has which slot, and what lies in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.portable._utils import host_tensor
from engines.portable.copies import to_device
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.portable.speculative.dynamic_tree_ops import NO_NODE, DynamicTree, pack_mask, packed_words


class DynamicTreeSlotStorage:
    """The tree of each slot, on the device: buffers of ``num_slots`` trees of ``num_nodes`` nodes, the root first.

    has_tree     bool [num_slots]: whether the last step of the slot's request stored a tree
    all_ids_buf  int64 [max_num_requests]: slot of each row of the batch
    packed_mask, position_offsets, retrieve_next_token, retrieve_next_sibling  as in ``DynamicTree``
    """

    def __init__(self, num_slots: int, num_nodes: int, max_num_requests: int, device: torch.device) -> None:
        self.num_nodes = num_nodes
        self.device = device
        self.all_ids_buf = torch.zeros(max_num_requests, dtype=torch.int64, device=device)
        self.has_tree = torch.zeros(num_slots, dtype=torch.bool, device=device)
        index = torch.arange(num_nodes, device=device)
        # Until a request has drafted, its nodes are placeholders: each follows the root and sees nothing else.
        star = (index == index.unsqueeze(1)) | (index == 0)
        self._placeholder = DynamicTree(
            packed_mask=pack_mask(star, packed_words(num_nodes)),
            position_offsets=(index > 0).int(),
            retrieve_next_token=torch.full_like(index, NO_NODE),
            retrieve_next_sibling=torch.full_like(index, NO_NODE),
        )
        self.packed_mask, self.position_offsets, self.retrieve_next_token, self.retrieve_next_sibling = (
            part.expand(num_slots, *part.shape).clone() for part in self._placeholder
        )

    def mark_invalid(self, slots: Tensor) -> None:
        """Forget the trees of slots, int64 [any] on the device."""
        self._store(slots, DynamicTree(*(part.expand(len(slots), *part.shape) for part in self._placeholder)), False)

    def scatter_to_slot_storage(self, slots: Tensor, tree: DynamicTree) -> None:
        """Keep the trees of a batch, one per slot of ``slots``."""
        self._store(slots, tree, True)

    def _store(self, slots: Tensor, tree: DynamicTree, valid: bool) -> None:
        self.packed_mask.index_copy_(0, slots, tree.packed_mask)
        self.position_offsets.index_copy_(0, slots, tree.position_offsets)
        self.retrieve_next_token.index_copy_(0, slots, tree.retrieve_next_token)
        self.retrieve_next_sibling.index_copy_(0, slots, tree.retrieve_next_sibling)
        self.has_tree.index_fill_(0, slots, valid)


class SpecTreeManager(SpecResourceManager):
    """Gives each request a slot for its trees, a dummy for its step.

    What the last owner of a slot left in it is forgotten when it is granted (upstream: when the owner ends).
    """

    def __init__(self, num_slots: int, num_nodes: int, max_num_requests: int, device: torch.device) -> None:
        super().__init__(num_slots)
        self.slot_storage = DynamicTreeSlotStorage(num_slots, num_nodes, max_num_requests, device)

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Grant slots to requests that start, and tell the device the slot of each row."""
        super().prepare_resources(scheduled_batch)
        slots = self.slot_manager.get_slots(request.py_request_id for request in scheduled_batch.all_requests())
        self.slot_storage.all_ids_buf[: len(slots)].copy_(self._upload(slots))

    def _add_slot(self, request: LlmRequest) -> int:
        slot = super()._add_slot(request)
        self.slot_storage.mark_invalid(self._upload([slot]))
        return slot

    def _upload(self, slots: Sequence[int]) -> Tensor:
        device = self.slot_storage.device
        return to_device("tree_slots", host_tensor(slots, device), device).long()
