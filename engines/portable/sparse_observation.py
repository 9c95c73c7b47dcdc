"""What the observer reads of a sparse backend: maps from tokens to rows and slots, and where those slots are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.pyexecutor.llm_request import LlmRequest

DEVICE_TENSORS: Final = (
    "req_idx_per_token",
    "slot_mapping_fp8",
    "block_table",
    "indexer_k_cache_block_offsets",
    "gen_kv_indptr",
    "gen_cached_token_indptr",
    "kv_lens_cuda_2d",
)


class SparseObserver:
    """Reads the sparse fields of attention metadata; ``begin`` when it is prepared for a batch."""

    def __init__(self, kv_cache_manager: DSACacheManager) -> None:
        self._manager = kv_cache_manager
        self._owners: dict[int, tuple[int, int]] = {}
        self._pages: list[int] = []

    def begin(self, batch: Sequence[LlmRequest], kv_lens: Sequence[int]) -> None:
        """Remember which row owns which pages, and how many of them its KV length takes."""
        owned = [self._manager.get_block_ids(request.py_request_id) for request in batch]
        self._owners = {page: (row, place) for row, pages in enumerate(owned) for place, page in enumerate(pages)}
        self._pages = [-(-kv // self._manager.tokens_per_block) for kv in kv_lens]

    def host_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the host."""
        return {"max_gen_seq_len": attn.max_gen_seq_len}

    def device_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the device, and the owners of the slots."""
        tokens, n, generations = attn.num_tokens, attn.num_seqs, attn.num_generations
        slots = attn.slot_mapping_fp8[:tokens]
        tables = {name: getattr(attn, name)[:n].tolist() for name in ("block_table", "indexer_k_cache_block_offsets")}
        return {
            "req_idx_per_token": attn.req_idx_per_token[:tokens].tolist(),
            "slot_mapping_fp8": slots.tolist(),
            "slot_owners": [self._owner(slot) for slot in self._manager.get_indexer_slots(slots).tolist()],
            "gen_kv_indptr": attn.gen_kv_indptr[: generations + 1].tolist(),
            "gen_cached_token_indptr": attn.gen_cached_token_indptr[: generations + 1].tolist(),
            "kv_lens_cuda_2d": attn.kv_lens_cuda_2d[:generations].tolist(),
            **{name: [row[:pages] for row, pages in zip(rows, self._pages)] for name, rows in tables.items()},
        }

    def _owner(self, slot: int) -> list[int]:
        page, offset = divmod(slot, self._manager.tokens_per_block)
        if page not in self._owners:
            return [-1, -1]
        row, place = self._owners[page]
        return [row, place * self._manager.tokens_per_block + offset]
