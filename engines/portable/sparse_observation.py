"""What the observer reads of a sparse backend: maps from tokens to rows and slots, and where those slots are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, Final

from torch import Tensor

from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import KVCacheManager

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


_SKIP_FLAGS: Final = ("skip_indexer_for_ctx_reqs", "skip_indexer_for_gen_reqs")


class SparseObserver:
    """Reads the sparse fields of attention metadata; ``begin`` when it is prepared for a batch.

    With several managers the pages are those of the one that the metadata refers to; a drafter's may have no indexer.
    """

    def __init__(self, kv_cache_managers: Sequence[KVCacheManager]) -> None:
        self._managers = kv_cache_managers
        self._owners: list[dict[int, dict[int, int]]] = []
        self._pages: list[list[int]] = []
        self._kv_lens: Sequence[int] = ()

    def begin(self, batch: Sequence[LlmRequest], kv_lens: Sequence[int]) -> None:
        """Remember which rows own which pages, and how many of them each KV length takes."""
        self._owners, self._pages, self._kv_lens = [], [], kv_lens
        for manager in self._managers:
            owned = [manager.get_memory_pool_indices(request.py_request_id) for request in batch]
            places: dict[int, dict[int, int]] = {}
            for row, pages in enumerate(owned):
                for place, page in enumerate(pages):
                    places.setdefault(page, {})[row] = place
            self._owners.append(places)
            self._pages.append([-(-kv // manager.tokens_per_block) for kv in kv_lens])

    def host_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the host."""
        names = ("max_gen_seq_len", *(_SKIP_FLAGS if _is_portable(attn) else ()))
        return {name: getattr(attn, name) for name in names}

    def device_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the device, and the owners of the slots."""
        tokens, generations = attn.num_tokens, attn.num_generations
        slots = attn.slot_mapping_fp8[:tokens]
        return {
            "req_idx_per_token": attn.req_idx_per_token[:tokens].tolist(),
            "slot_mapping_fp8": slots.tolist(),
            "slot_owners": self._owners_of_data(attn, slots),
            "scale_owners": self._owners_of_scales(attn, attn.slot_mapping_scale[:tokens]),
            **({"topk_indices_buffer": _dense_rows(attn)} if _is_portable(attn) else {}),
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

    def prepared_fields(self, attn: Any) -> dict[str, Any]:
        """What is only written by ``prepare``, for contexts."""
        if not _is_portable(attn):
            return {}
        contexts, tokens = attn.num_contexts, attn.num_ctx_tokens
        names = ("ctx_kv_indptr", "ctx_cached_token_indptr")
        fields = {name: getattr(attn, name)[: contexts + 1].tolist() for name in names}
        return fields | {name: getattr(attn, name)[:tokens].tolist() for name in ("cu_seqlen_ks", "cu_seqlen_ke")}

    def full_fields(self, attn: Any) -> dict[str, Any]:
        """Where all keys of the contexts are, the cached ones too."""
        if not _is_portable(attn) or not attn.num_contexts:
            return {}
        manager = self._indexer(self._referred(attn))
        ratio = manager.tokens_per_block // manager.index_tokens_per_block
        rows = [row for row, kv in enumerate(self._kv_lens[: attn.num_contexts]) for _ in range(kv // ratio)]
        return {"fullkv_owners": self._owners_of_data(attn, attn.slot_mapping_fp8_fullkv, rows)}

    def expanded_fields(self, attn: Any, *, of_target: bool) -> dict[str, Any]:
        """What is repeated for each row of a generation, where it is; pages where a drafter reads them so too."""
        count, width = attn.num_generations, 1 + attn.max_draft_tokens
        if not _is_portable(attn) or not attn.expands_generations:
            return {}
        fields = {"kv_lens_expanded_cuda": attn.kv_lens_expanded_cuda[: count * width].tolist()}
        if of_target or attn.reads_expanded_rows:
            pages = self._pages[self._referred(attn)]
            used = [n for n in pages[attn.num_contexts :] for _ in range(width)]
            table = attn.block_table_expanded[: count * width].tolist()
            fields["block_table_expanded"] = [row[:n] for row, n in zip(table, used)]
        return fields

    def verify_row_fields(self, attn: Any) -> dict[str, Any]:
        """What the rows of the generations are told each, where these differ in how many they have."""
        if not _is_portable(attn) or attn.ragged_verify_lens is None:
            return {}
        rows = sum(attn.ragged_verify_lens)
        return {name: getattr(attn, name)[:rows].tolist() for name in ("row_req_idx_cuda", "row_kv_lens_cuda")}

    def _owners_of_data(self, attn: Any, byte_offsets: Tensor, rows: Sequence[int] = ()) -> list[list[int]]:
        """Whose each slot is; where it is shared, of the one of ``rows`` if that is an owner."""
        referred = self._referred(attn)
        slots = self._indexer(referred).get_indexer_slots(byte_offsets)
        wanted = chain(rows, repeat(None))
        return [self._owner(referred, slot, row) for slot, row in zip(slots.tolist(), wanted)]

    def _owners_of_scales(self, attn: Any, byte_offsets: Tensor) -> list[list[int]]:
        referred = self._referred(attn)
        manager, owners = self._indexer(referred), []
        size = manager.index_tokens_per_block
        for byte_offset in byte_offsets.tolist():
            page, rest = divmod(byte_offset, manager.index_page_bytes)
            offset, misplaced = divmod(rest - size * manager.index_data_bytes, manager.index_scale_bytes)
            inside = not misplaced and 0 <= offset < size
            owners.append(self._owner(referred, page * manager.tokens_per_block + offset) if inside else [-1, -1])
        return owners

    def _owner(self, referred: int, slot: int, wanted: int | None = None) -> list[int]:
        manager = self._indexer(referred)
        page, offset = divmod(slot, manager.tokens_per_block)
        if page not in self._owners[referred]:
            return [-1, -1]
        places = self._owners[referred][page]
        row = wanted if wanted in places else next(iter(places))
        place = places[row]
        return [row, place * manager.index_tokens_per_block + offset]

    def _indexer(self, referred: int) -> DSACacheManager:
        manager = self._managers[referred]
        assert isinstance(manager, DSACacheManager), "a map of the indexer where there is none"
        return manager

    def _referred(self, attn: Any) -> int:
        """Which manager the metadata refers to; the first if it is none of them."""
        return next((i for i, manager in enumerate(self._managers) if attn.kv_cache_manager is manager), 0)


def _is_portable(attn: Any) -> bool:
    """Whether ``attn`` is the class of this engine: upstream's own fills these by settings that scenarios lack."""
    return isinstance(attn, DSAtrtllmAttentionMetadata)


def _dense_rows(attn: Any) -> list[list[int] | None]:
    """What the tokens of short sequences attend to, None for the others."""
    contexts, tokens = attn.num_ctx_tokens, attn.num_tokens
    rows = [[i for i in row if i >= 0] for row in attn.topk_indices_buffer[:tokens].tolist()]
    skips = [attn.skip_indexer_for_ctx_reqs] * contexts + [attn.skip_indexer_for_gen_reqs] * (tokens - contexts)
    return [row if skip else None for row, skip in zip(rows, skips)]
