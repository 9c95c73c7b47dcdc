"""What the observer reads of a sparse backend: maps from tokens to rows and slots, and where those slots are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
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


_SKIP_FLAGS: Final = ("skip_indexer_for_ctx_reqs", "skip_indexer_for_gen_reqs")


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
        names = ("max_gen_seq_len", *(_SKIP_FLAGS if _is_portable(attn) else ()))
        return {name: getattr(attn, name) for name in names}

    def device_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the device, and the owners of the slots."""
        tokens, n, generations = attn.num_tokens, attn.num_seqs, attn.num_generations
        slots = attn.slot_mapping_fp8[:tokens]
        tables = {name: getattr(attn, name)[:n].tolist() for name in ("block_table", "indexer_k_cache_block_offsets")}
        return {
            "req_idx_per_token": attn.req_idx_per_token[:tokens].tolist(),
            "slot_mapping_fp8": slots.tolist(),
            "slot_owners": self._owners_of_data(slots),
            "scale_owners": [self._owner_of_scale(offset) for offset in attn.slot_mapping_scale[:tokens].tolist()],
            **({"topk_indices_buffer": _dense_rows(attn)} if _is_portable(attn) else {}),
            "gen_kv_indptr": attn.gen_kv_indptr[: generations + 1].tolist(),
            "gen_cached_token_indptr": attn.gen_cached_token_indptr[: generations + 1].tolist(),
            "kv_lens_cuda_2d": attn.kv_lens_cuda_2d[:generations].tolist(),
            **{name: [row[:pages] for row, pages in zip(rows, self._pages)] for name, rows in tables.items()},
        }

    def prepared_fields(self, attn: Any) -> dict[str, Any]:
        """What is only written by ``prepare``, for contexts."""
        if not _is_portable(attn):
            return {}
        contexts, tokens = attn.num_contexts, attn.num_ctx_tokens
        names = ("ctx_kv_indptr", "ctx_cached_token_indptr")
        fields = {name: getattr(attn, name)[: contexts + 1].tolist() for name in names}
        fields |= {name: getattr(attn, name)[:tokens].tolist() for name in ("cu_seqlen_ks", "cu_seqlen_ke")}
        return fields | ({"fullkv_owners": self._owners_of_data(attn.slot_mapping_fp8_fullkv)} if contexts else {})

    def expanded_fields(self, attn: Any, *, with_pages: bool) -> dict[str, Any]:
        """What is repeated for each row of a generation, where it is."""
        count, width = attn.num_generations, 1 + attn.max_draft_tokens
        if not _is_portable(attn) or not attn.expands_generations:
            return {}
        fields = {"kv_lens_expanded_cuda": attn.kv_lens_expanded_cuda[: count * width].tolist()}
        if with_pages:
            used = [pages for pages in self._pages[attn.num_contexts :] for _ in range(width)]
            table = attn.block_table_expanded[: count * width].tolist()
            fields["block_table_expanded"] = [row[:pages] for row, pages in zip(table, used)]
        return fields

    def _owners_of_data(self, byte_offsets: Tensor) -> list[list[int]]:
        return [self._owner(slot) for slot in self._manager.get_indexer_slots(byte_offsets).tolist()]

    def _owner_of_scale(self, byte_offset: int) -> list[int]:
        manager = self._manager
        page, rest = divmod(byte_offset, manager.index_page_bytes)
        offset, misplaced = divmod(
            rest - manager.tokens_per_block * manager.index_data_bytes, manager.index_scale_bytes
        )
        inside = not misplaced and 0 <= offset < manager.tokens_per_block
        return self._owner(page * manager.tokens_per_block + offset) if inside else [-1, -1]

    def _owner(self, slot: int) -> list[int]:
        page, offset = divmod(slot, self._manager.tokens_per_block)
        if page not in self._owners:
            return [-1, -1]
        row, place = self._owners[page]
        return [row, place * self._manager.tokens_per_block + offset]


def _is_portable(attn: Any) -> bool:
    """Whether ``attn`` is the class of this engine: upstream's own fills these by settings that scenarios lack."""
    return isinstance(attn, DSAtrtllmAttentionMetadata)


def _dense_rows(attn: Any) -> list[list[int] | None]:
    """What the tokens of short sequences attend to, None for the others."""
    contexts, tokens = attn.num_ctx_tokens, attn.num_tokens
    rows = [[i for i in row if i >= 0] for row in attn.topk_indices_buffer[:tokens].tolist()]
    skips = [attn.skip_indexer_for_ctx_reqs] * contexts + [attn.skip_indexer_for_gen_reqs] * (tokens - contexts)
    return [row if skip else None for row, skip in zip(rows, skips)]
