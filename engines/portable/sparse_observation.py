"""What the observer reads of a sparse backend: maps from tokens to rows and slots, and where those slots are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.pyexecutor.llm_request import LlmRequest

DEVICE_TENSORS: Final = (
    "req_idx_per_token",
    "slot_mapping_fp8",
    "slot_mapping_scale",
    "block_table",
    "indexer_k_cache_block_offsets",
    "gen_kv_indptr",
    "gen_cached_token_indptr",
    "kv_lens_cuda_2d",
)


class SparseObserver:
    """Reads the sparse fields of attention metadata; ``begin`` when it is prepared for a batch.

    With several managers the pages are those of the one that the metadata refers to.
    """

    def __init__(self, kv_cache_managers: Sequence[DSACacheManager]) -> None:
        self._managers = kv_cache_managers
        self._owners: list[dict[int, tuple[int, int]]] = []
        self._pages: list[list[int]] = []

    def begin(self, batch: Sequence[LlmRequest], kv_lens: Sequence[int]) -> None:
        """Remember which row owns which pages, and how many of them its KV length takes."""
        self._owners, self._pages = [], []
        for manager in self._managers:
            owned = [manager.get_memory_pool_indices(request.py_request_id) for request in batch]
            self._owners.append({p: (row, place) for row, pages in enumerate(owned) for place, p in enumerate(pages)})
            self._pages.append([-(-kv // manager.tokens_per_block) for kv in kv_lens])

    def host_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the host."""
        return {"max_gen_seq_len": attn.max_gen_seq_len}

    def device_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the device, and the owners of the slots."""
        tokens, generations = attn.num_tokens, attn.num_generations
        slots = attn.slot_mapping_fp8[:tokens]
        manager = self._managers[self._referred(attn)]
        owners = self._owners[self._referred(attn)]
        return {
            "req_idx_per_token": attn.req_idx_per_token[:tokens].tolist(),
            "slot_mapping_fp8": slots.tolist(),
            "slot_owners": [_owner(slot, manager, owners) for slot in manager.get_indexer_slots(slots).tolist()],
            "gen_kv_indptr": attn.gen_kv_indptr[: generations + 1].tolist(),
            "gen_cached_token_indptr": attn.gen_cached_token_indptr[: generations + 1].tolist(),
            "kv_lens_cuda_2d": attn.kv_lens_cuda_2d[:generations].tolist(),
            **self.tables(attn),
        }

    def tables(self, attn: Any) -> dict[str, Any]:
        """The tables of pages, of the length that each row was prepared with."""
        pages = self._pages[self._referred(attn)]
        return {
            name: [row[:n] for row, n in zip(getattr(attn, name)[: len(pages)].tolist(), pages)]
            for name in ("block_table", "indexer_k_cache_block_offsets")
        }

    def _referred(self, attn: Any) -> int:
        """Which manager the metadata refers to; the first if it is none of them."""
        return next((i for i, manager in enumerate(self._managers) if attn.kv_cache_manager is manager), 0)


def _owner(slot: int, manager: DSACacheManager, owners: dict[int, tuple[int, int]]) -> list[int]:
    page, offset = divmod(slot, manager.tokens_per_block)
    if page not in owners:
        return [-1, -1]
    row, place = owners[page]
    return [row, place * manager.tokens_per_block + offset]
