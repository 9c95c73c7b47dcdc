"""What the observer reads of compressed attention: lengths and indices per ratio, tables, and compressed tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from engines.portable.attention.backends.sparse.deepseek_v4.cache_manager import DeepseekV4CacheManager
from engines.portable.attention.backends.trtllm import TARGET_LAYER
from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.sparse_observation import SparseObserver

DEVICE_TENSORS: Final = (
    "req_idx_per_token",
    "slot_mapping_fp8",
    "slot_mapping_scale",
    "indexer_k_cache_block_offsets",
    "gen_kv_indptr",
    "gen_cached_token_indptr",
    "kv_lens_cuda_2d",
    "cached_token_lens",
    "cu_seq_lens",
    "swa_local_indices",
    "compressed_local_indices",
    "sliding_block_tables",
)
_OF_ROWS: Final = ("new_comp_kv_lens", "compressed_kv_lens", "past_kv_lens")


class CompressedObserver(SparseObserver):
    """Reads the fields of compressed attention as its base does those of sparse attention."""

    def begin(self, batch: Sequence[LlmRequest], kv_lens: Sequence[int]) -> None:
        """Remember which row owns which pages."""
        super().begin(batch, kv_lens)
        self._granted = [[len(m.get_block_ids(r.py_request_id)) for r in batch] for m in self._managers]

    def host_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the host."""
        return {"max_gen_seq_len": attn.max_gen_seq_len}

    def device_fields(self, attn: Any) -> dict[str, Any]:
        """What lives on the device and is about the rows of any forward."""
        n, tokens, generations = attn.num_seqs, attn.num_tokens, attn.num_generations
        names = ("req_idx_per_token", "swa_local_indices", "compressed_local_indices")
        return {
            **{name: getattr(attn, name)[:tokens].tolist() for name in names if hasattr(attn, name)},
            "gen_kv_indptr": attn.gen_kv_indptr[: generations + 1].tolist(),
            "gen_cached_token_indptr": attn.gen_cached_token_indptr[: generations + 1].tolist(),
            "kv_lens_cuda_2d": attn.kv_lens_cuda_2d[:generations].tolist(),
            "cached_token_lens": attn.cached_token_lens[:n].tolist(),
            "cu_seq_lens": attn.cu_seq_lens[: n + 1].tolist(),
            **{name: _per_ratio(getattr(attn, name), n) for name in _OF_ROWS},
            "cu_new_comp_kv": _per_ratio(attn.cu_new_comp_kv, n + 1),
            "compressed_position_ids": {
                r: ids[: int(attn.cu_new_comp_kv[r][n])].tolist() for r, ids in attn.compressed_position_ids.items()
            },
            "compressed_mask": _per_ratio(attn.compressed_mask, tokens),
            "sparse_mla_topk_lens": _per_ratio(attn.sparse_mla_topk_lens, tokens),
            "sliding_block_tables": self._table(attn.sliding_block_tables, self._referred(attn)),
        }

    def expanded_fields(self, attn: Any, *, of_target: bool) -> dict[str, Any]:
        """What only the target reads: where compressed tokens and the indexer's keys go, and the tables of both."""
        if not of_target:
            return {}
        added = int(attn.cu_new_comp_kv[attn.sparse_metadata_params.indexer_compress_ratio][attn.num_seqs])
        slots = attn.slot_mapping_fp8[:added]
        return {
            "slot_mapping_fp8": slots.tolist(),
            "slot_owners": self._owners_of_data(attn, slots),
            "scale_owners": self._owners_of_scales(attn, attn.slot_mapping_scale[:added]),
            **self._target_tables(attn),
        }

    def tables(self, attn: Any) -> dict[str, Any]:
        """The tables of pages once a forward has ended: of the target's cache."""
        sliding = self._table(attn.sliding_block_tables, self._referred(attn))
        return {"sliding_block_tables": sliding, **self._target_tables(attn)}

    def prepared_fields(self, attn: Any) -> dict[str, Any]:
        """What is only written by ``prepare``, for contexts."""
        tokens = attn.num_ctx_tokens
        fields = {name: getattr(attn, name)[:tokens].tolist() for name in ("cu_seqlen_ks", "cu_seqlen_ke")}
        return fields | super().full_fields(attn)

    def full_fields(self, attn: Any) -> dict[str, Any]:
        """Nothing for a drafter."""
        return {}

    def _target_tables(self, attn: Any) -> dict[str, Any]:
        tables = {r: self._table(table, 0) for r, table in attn.compress_block_tables.items()}
        indexer = attn.indexer_k_cache_block_offsets[: len(self._pages[0])].tolist()
        used = [row[:count] for row, count in zip(indexer, self._pages[0])]
        return {"compress_block_tables": tables, "indexer_k_cache_block_offsets": used}

    def _table(self, table: torch.Tensor, manager: int) -> list[list[int]]:
        granted = self._granted[manager]
        return [row[:count] for row, count in zip(table[: len(granted)].tolist(), granted)]


def compressed_content(manager: DeepseekV4CacheManager, used: Mapping[int, int]) -> dict[str, Any]:
    """What the committed compressed tokens of each request hold, per ratio, and those in the indexer's cache.

    used  tokens that each request has cached
    """
    pools = {ratio: manager.get_compressed_buffers(ratio) for ratio in manager.compress_ratios[1:]}
    indexed = manager.compress_ratios[1]
    keys = _compressed(manager, manager.get_indexer_k_cache_buffers(TARGET_LAYER), indexed, used)
    kept = {ratio: _compressed(manager, pool, ratio, used) for ratio, pool in pools.items()}
    return {"target_compressed_kv": kept, "target_indexer_kv": keys}


def _compressed(
    manager: DeepseekV4CacheManager, pool: torch.Tensor, ratio: int, used: Mapping[int, int]
) -> dict[int, list[int]]:
    in_pages = pool[:, : manager.compressed_block_size(ratio)].tolist()
    return {
        i: [value for page in manager.get_memory_pool_indices(i) for value in in_pages[page]][: tokens // ratio]
        for i, tokens in used.items()
    }


def _per_ratio(buffers: Mapping[int, torch.Tensor], count: int) -> dict[int, list[Any]]:
    return {ratio: buffer[:count].tolist() for ratio, buffer in buffers.items()}
