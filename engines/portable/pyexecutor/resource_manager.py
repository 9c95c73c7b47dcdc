"""What requests own: pages of the KV cache with the pools that hold the entries, and slots of per-request state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engines.portable._utils import host_tensor
from engines.portable.copies import copy_to_device, to_device
from engines.portable.pyexecutor.block_reuse import ReusableBlocks
from engines.portable.pyexecutor.host_offload import HostOffload
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from scenarios.tracer import EMPTY


class KVCacheManager:
    """One block table per request over one pool per layer; pages hold ``tokens_per_block`` tokens.

    Target and draft layers share a manager, but with a separate draft KV cache: then the layers from ``first_layer``
    on have one of their own. A page is called by its id, and with ``host_offload`` that is not where it lies.

    kv_cache_pools           int64 [num_layers, num_blocks, tokens_per_block], device
    layer_offsets            place in the pools of each layer that lives here
    kv_reserve_draft_tokens  drafts that a generation is granted room for at least, whatever the step's draft length
    context_reserve_draft_tokens  the same of a prompt: with the overlap scheduler the host counts all rows of a step
        in flight, and the draft length may have grown since the first chunk
    reusable_blocks          pages that a prompt may begin with, as an earlier one has; None without block reuse
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        tokens_per_block: int,
        max_seq_len: int,
        max_total_draft_tokens: int,
        num_extra_kv_tokens: int,
        device: torch.device,
        first_layer: int = 0,
        host_offload: bool = False,
        kv_reserve_draft_tokens: int = 0,
        context_reserve_draft_tokens: int = 0,
        enable_block_reuse: bool = False,
        reuse_look_ahead: int = 0,
    ) -> None:
        self.kv_reserve_draft_tokens = kv_reserve_draft_tokens
        self.context_reserve_draft_tokens = context_reserve_draft_tokens
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        # A request at its longest is granted one more set of draft slots (PR #12306).
        self.max_blocks_per_seq = min(self._blocks(max_seq_len + max_total_draft_tokens), num_blocks)
        self.num_extra_kv_tokens = num_extra_kv_tokens
        self.device = device
        self.num_blocks = num_blocks
        self.kv_cache_pools = torch.full(
            (num_layers, num_blocks, tokens_per_block), EMPTY, dtype=torch.int64, device=device
        )
        self._layers = self.kv_cache_pools.unbind()
        self.layer_offsets = {first_layer + i: i for i in range(num_layers)}
        # The page freed last is granted first, so that what it still holds is soon somebody else's. The managers of
        # target and drafter begin at opposite ends, so that a page of one is hardly ever the same request's in both.
        self._free_blocks = list(range(num_blocks))[:: 1 if first_layer else -1]
        self._offloading = HostOffload(num_blocks) if host_offload else None
        self.reusable_blocks = ReusableBlocks(tokens_per_block, reuse_look_ahead) if enable_block_reuse else None
        self._block_ids: dict[int, list[int]] = {}
        self._num_tokens: dict[int, int] = {}

    def get_buffers(self, layer_idx: int) -> torch.Tensor:
        """The pool of a layer: int64 [num_blocks, tokens_per_block]. Raises ``KeyError`` if it does not live here."""
        return self._layers[self.layer_offsets[layer_idx]]

    def get_num_free_blocks(self) -> int:
        """Pages that nobody owns, known ones among them."""
        return len(self._free_blocks) + (0 if self.reusable_blocks is None else len(self.reusable_blocks))

    def get_block_ids(self, request_id: int) -> list[int]:
        """Ids of the pages of a request, in order; empty when it owns none."""
        return self._block_ids.get(request_id, [])

    def get_memory_pool_indices(self, request_id: int) -> list[int]:
        """Where these pages lie in the pool, which is what kernels are told (PR #13124)."""
        return self._memory_pool_indices(self.get_block_ids(request_id))

    def get_num_tokens(self, request_id: int) -> int:
        """Tokens granted to a request."""
        return self._num_tokens.get(request_id, 0)

    def add_dummy_requests(self, requests: Sequence[LlmRequest]) -> None:
        """Grant dummies what they would have been granted before this step: their past, and the extra tokens."""
        granted = [
            self._add_tokens(request, request.num_cached_tokens + self.num_extra_kv_tokens)
            for request in requests
            if not request.is_context
        ]
        self._empty(granted)

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Grant the tokens of a step: a prompt as a whole with its first chunk, a generation its rows.

        What is reused of any prompt is claimed before a page is granted, which might be one of those.
        Raises ``RuntimeError`` when the pool is exhausted.
        """
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk and request.prepopulated_prompt_len:
                self._claim_blocks(request)
        granted = []
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk:
                reserved = 0 if request.is_dummy else self.context_reserve_draft_tokens
                drafts = max(len(request.py_draft_tokens), reserved)
                granted.append(self._add_tokens(request, request.py_prompt_len + self.num_extra_kv_tokens + drafts))
        for request in scheduled_batch.generation_requests:
            tokens = 1 + max(len(request.py_draft_tokens), self.kv_reserve_draft_tokens)
            granted.append(self._add_tokens(request, tokens))
        self._empty(granted)

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Take back what each generation of the step did not use."""
        for request in scheduled_batch.generation_requests:
            if request.is_finished or request.is_attention_dp_dummy:
                # It ended while this step was in flight, and owns nothing any more (PR #9693).
                continue
            if request.py_rewind_len > 0:
                self.rewind_kv_cache(request, request.py_rewind_len)
            reserved = self.kv_reserve_draft_tokens - request.py_rewind_len - request.py_num_accepted_draft_tokens
            if reserved > 0:
                self.rewind_kv_cache(request, reserved)
        if self._offloading is not None:
            self._offloading.swap(self._free_blocks, self.kv_cache_pools)

    def rewind_kv_cache(self, request: LlmRequest, rewind_len: int) -> None:
        """Take the last ``rewind_len`` tokens back, and the pages that are then not needed."""
        request_id = request.py_request_id
        self._num_tokens[request_id] -= rewind_len
        blocks = self._block_ids[request_id]
        while len(blocks) > self._blocks(self._num_tokens[request_id]):
            self._release_block(blocks.pop())

    def free_resources(self, request: LlmRequest) -> None:
        """Take everything back; does nothing for a request that owns nothing."""
        self._num_tokens.pop(request.py_request_id, None)
        blocks = self._block_ids.pop(request.py_request_id, [])
        if self.reusable_blocks is None:
            self._free_blocks.extend(blocks)
            return
        # From the last one on: what is released first is taken first, and no page is of use without those before it.
        for block_id in reversed(blocks):
            self._release_block(block_id)

    def store_blocks_for_reuse(self, request: LlmRequest) -> None:
        """The prompt of a request is computed: its full pages may be reused from now on."""
        if self.reusable_blocks is not None:
            self.reusable_blocks.store(request.prompt, self.get_block_ids(request.py_request_id))

    def reset_reuse_state(self) -> None:
        """Nothing is known of any page any more."""
        if self.reusable_blocks is not None:
            self._free_blocks.extend(self.reusable_blocks.reset())

    def copy_batch_block_offsets(self, dst: torch.Tensor, request_ids: Sequence[int]) -> None:
        """Write the block tables of a batch to its first rows: int32 [pools, rows, 2, max_blocks_per_seq].

        K and V of a token lie in the same page here.
        """
        copy_to_device("block_offsets", dst[:, : len(request_ids)], self.get_block_table(request_ids).unsqueeze(1))

    def get_block_table(self, request_ids: Sequence[int]) -> torch.Tensor:
        """Where the pages of each request lie, in order: int32 [n, max_blocks_per_seq], host.

        Columns after a request's pages are 0, a valid page.
        """
        columns = self.max_blocks_per_seq
        flat: list[int] = []
        for request_id in request_ids:
            pages = self.get_memory_pool_indices(request_id)[:columns]
            flat += pages
            flat += [0] * (columns - len(pages))
        return host_tensor(flat, self.device).view(len(request_ids), columns)

    def get_block_ids_per_seq(self, request_ids: Sequence[int]) -> torch.Tensor:
        """What a kernel of flash MLA is told of the pages of each request: int32 [n, max_blocks_per_seq], host.

        Places in the pool, despite the name; columns after them are 0.
        """
        return self.get_block_table(request_ids).clamp(min=0)

    def get_batch_cache_indices(
        self, request_ids: Sequence[int], num_blocks_per_seq: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Where the pages of each request lie, in order; the first ``num_blocks_per_seq`` of each, if given."""
        pages = [self.get_memory_pool_indices(request_id) for request_id in request_ids]
        counts = [len(owned) for owned in pages] if num_blocks_per_seq is None else num_blocks_per_seq
        return [owned[:count] for owned, count in zip(pages, counts)]

    def _add_tokens(self, request: LlmRequest, num_tokens: int) -> list[int]:
        """Grant a request ``num_tokens`` more; returns the ids of the pages that it is granted for them."""
        request_id = request.py_request_id
        num_tokens += self._num_tokens.get(request_id, 0)
        self._num_tokens[request_id] = num_tokens
        blocks = self._block_ids.setdefault(request_id, [])
        owned, needed = len(blocks), self._blocks(num_tokens)
        while len(blocks) < needed:
            if not self.get_num_free_blocks():
                raise RuntimeError(f"KV cache exhausted: request {request_id} needs a page and none is free")
            # One statement: a page is free or owned, never neither.
            blocks.append(self._take_block())
        return blocks[owned:]

    def _empty(self, granted: Iterable[list[int]]) -> None:
        """Let pages that were granted hold nothing."""
        block_ids = [block_id for ids in granted for block_id in ids]
        if block_ids:
            pages = host_tensor(self._memory_pool_indices(block_ids), self.device)
            self.kv_cache_pools.index_fill_(1, to_device("granted_blocks", pages, self.device).long(), EMPTY)

    def _take_block(self) -> int:
        """A free page: one of which nothing is known, while there is any."""
        if self._free_blocks:
            return self._free_blocks.pop()
        assert self.reusable_blocks is not None
        return self.reusable_blocks.reclaim()

    def _release_block(self, block_id: int) -> None:
        if self.reusable_blocks is None or self.reusable_blocks.release(block_id):
            self._free_blocks.append(block_id)

    def _claim_blocks(self, request: LlmRequest) -> None:
        """Let a prompt begin with the known pages that hold what it reuses."""
        assert self.reusable_blocks is not None
        reused = self.reusable_blocks.find(request.prompt)[: request.prepopulated_prompt_len // self.tokens_per_block]
        self.reusable_blocks.claim(reused)
        self._block_ids[request.py_request_id] = reused

    def _memory_pool_indices(self, block_ids: list[int]) -> list[int]:
        return block_ids if self._offloading is None else self._offloading.memory_pool_indices(block_ids)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)


class SlotManager:
    """Gives each request a slot of its own among ``num_slots``."""

    def __init__(self, num_slots: int) -> None:
        # The slot freed last is granted first, so that what it still holds is soon somebody else's.
        self._free_slots = list(range(num_slots))[::-1]
        self._slots: dict[int, int] = {}

    def add_slot(self, request_id: int) -> int:
        """Grant a slot; raises ``ValueError`` for a request that has one and ``RuntimeError`` when none is free."""
        if request_id in self._slots:
            raise ValueError(f"request {request_id} already has a slot")
        if not self._free_slots:
            raise RuntimeError(f"request {request_id} needs a slot and none is free")
        self._slots[request_id] = self._free_slots.pop()
        return self._slots[request_id]

    def get_slots(self, request_ids: Iterable[int]) -> list[int]:
        """Slots of requests, in their order; raises ``KeyError`` for one that has none."""
        return [self._slots[request_id] for request_id in request_ids]

    def get_slot(self, request_id: int) -> int | None:
        """Slot of a request, None when it has none."""
        return self._slots.get(request_id)

    def taken(self) -> dict[int, int]:
        """Slot of each request that has one."""
        return dict(self._slots)

    def remove_slot(self, request_id: int) -> None:
        """Take a slot back; does nothing for a request that has none."""
        if request_id in self._slots:
            self._free_slots.append(self._slots.pop(request_id))


class SpecResourceManager:
    """What a worker keeps for each request from its first prompt token to its end, by slot.

    The executor asks it after the KV-cache manager. There is a slot per page of the KV cache (upstream: per row of
    a batch, and one more), as requests that are not in the batch keep theirs, and each owns a page.

    sa_manager  suffix automata of the same requests, which have slots of their own; None without
    """

    def __init__(self, num_slots: int) -> None:
        self.slot_manager = SlotManager(num_slots)
        self.sa_manager: SpecResourceManager | None = None

    def add_dummy_requests(self, requests: Sequence[LlmRequest]) -> None:
        """Grant dummy generations the slots that they would have been granted in an earlier step."""
        for request in requests:
            if not request.is_context:
                self._add_slot(request)
        if self.sa_manager is not None:
            self.sa_manager.add_dummy_requests(requests)

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Grant a slot to each request that starts; all others have theirs."""
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk:
                self._add_slot(request)
        if self.sa_manager is not None:
            self.sa_manager.prepare_resources(scheduled_batch)

    def free_resources(self, request: LlmRequest) -> None:
        """Take the slot back; does nothing for a request that has none."""
        self.slot_manager.remove_slot(request.py_request_id)
        if self.sa_manager is not None:
            self.sa_manager.free_resources(request)

    def _add_slot(self, request: LlmRequest) -> int:
        return self.slot_manager.add_slot(request.py_request_id)
