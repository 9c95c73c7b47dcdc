"""Upstream's own metadata of the attention backends: loaded where a checkout has it, tried out, and driven.

``TrtllmAttentionMetadata`` and ``DSAtrtllmAttentionMetadata`` are made by their own constructors and changed by their
own setters. A class below each translates what the suite's engine and models ask for and this version lacks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.tensorrt_llm.cache_managers import DSACacheManager, KVCacheManager
from engines.tensorrt_llm.source import Source, attention_package
from engines.tensorrt_llm.stand_ins import DSAMetadataParams, MappingStandIn
from scenarios import BACKENDS

_PLACES: Final = (
    ("TRTLLM", ("trtllm",)),
    ("DSA", ("sparse.dsa.metadata", "sparse.dsa.indexer")),
    ("DSA", ("sparse.dsa",)),
)
"""Backend, and the modules of its metadata below the attention package; what is newer comes first."""


class Location(NamedTuple):
    """Where a class is: its module, and all modules of the checkout that it is loaded with."""

    module: str
    modules: tuple[str, ...]


def locate(source: Source) -> dict[str, Location]:
    """Backend -> place of its metadata class, for those whose files the checkout has, dense ones first."""
    package = attention_package(source.layout)
    found: dict[str, Location] = {}
    for backend, parts in _PLACES:
        modules = tuple(f"{package}.{part}" for part in parts)
        if backend not in found and all(source.file(module).is_file() for module in modules):
            found[backend] = Location(modules[0], modules)
    return found


def driven_class(real: Any) -> type:
    """``real``, metadata of either backend, with what the suite's model engine and tracer model ask for."""
    return _driven_sparse(_driven(real)) if real.__name__ == BACKENDS["DSA"].metadata else _driven(real)


def _driven(real: Any) -> type:
    class Driven(real):
        """Upstream's class, told of drafts as upstream's engine tells it, with running totals for the tracer model."""

        def update_spec_dec_param(
            self, is_spec_decoding_enabled: bool, spec_metadata: Any, batch_size: int = 0, num_contexts: int = 0
        ) -> None:
            """Linear drafts of a one-model worker; upstream's engine passes these values."""
            values = {
                "batch_size": batch_size,
                "is_spec_decoding_enabled": is_spec_decoding_enabled,
                "is_spec_dec_tree": False,
                "is_spec_dec_dynamic_tree": False,
                "max_draft_len": spec_metadata.max_draft_len,
                "max_total_draft_tokens": spec_metadata.max_draft_len,
                "spec_metadata": spec_metadata,
                "num_contexts": num_contexts,
            }
            known = inspect.signature(super().update_spec_dec_param).parameters
            super().update_spec_dec_param(**{name: value for name, value in values.items() if name in known})

        def mla_scheduler_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
            """Running totals of the query and of the KV lengths, from 0 on: two of int32 [n + 1], device."""
            lens = self.seq_lens_cuda, self.kv_lens_cuda[: self.num_seqs]
            query, kv = (torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in lens)
            return query, kv

    return Driven


def _driven_sparse(base: Any) -> type:
    class DrivenSparse(base):
        """With what the attention of ``engines.portable`` asks its metadata, out of what every version has."""

        skip_indexer_for_ctx_reqs = False
        skip_indexer_for_gen_reqs = False
        reads_verify_rows = False

        def __init__(self, *, sparse_metadata_params: DSAMetadataParams, **options: Any) -> None:
            # The older version reads its settings from an attribute of this name.
            self.sparse_attention_config = sparse_metadata_params
            super().__init__(sparse_metadata_params=sparse_metadata_params, **options)

        def indexer_context_lens(self) -> torch.Tensor:
            """Keys up to each token of the contexts: int64 [num_ctx_tokens]."""
            contexts, tokens = self.num_contexts, self.num_ctx_tokens
            lens = self.seq_lens_cuda[:contexts]
            rows = torch.repeat_interleave(torch.arange(contexts, device=lens.device), lens, output_size=tokens)
            first = self.kv_lens_cuda[:contexts] - lens.cumsum(0)
            return torch.arange(1, tokens + 1, device=lens.device) + first.index_select(0, rows)

        def indexer_kv_lens(self) -> torch.Tensor:
            """KV length of the generation of each row: int32 [num_tokens - num_ctx_tokens]."""
            generations = self.num_generations
            next_n = (self.num_tokens - self.num_ctx_tokens) // max(generations, 1)
            lens: torch.Tensor = self.kv_lens_cuda_2d[:generations, :1]
            return lens.expand(-1, next_n).flatten()

        def indexer_block_table(self) -> torch.Tensor:
            """Pages of each sequence in the indexer's pools: int32 [n, pages]."""
            table: torch.Tensor = self.indexer_k_cache_block_offsets[: self.num_seqs]
            return table

    if hasattr(base, "_ensure_pool_view_cached"):
        return DrivenSparse

    class DrivenUncached(DrivenSparse):
        """The older version: each layer takes parts of map and table for itself, and kernels get the lengths."""

        def _ensure_pool_view_cached(self) -> None:
            contexts, ctx_tokens = self.num_contexts, self.num_ctx_tokens
            self._cached_block_table_ctx = self.block_table[:contexts]
            self._cached_block_table_gen = self.block_table[contexts : self.num_seqs]
            self._cached_req_idx_ctx = self.req_idx_per_token[:ctx_tokens]
            self._cached_req_idx_gen = self.req_idx_per_token[ctx_tokens : self.num_tokens] - contexts

        @property
        def kv_lens_cuda_2d(self) -> torch.Tensor:
            """KV length of each generation, in as many columns as it may feed rows: int32."""
            lens: torch.Tensor = self.kv_lens_cuda[self.num_contexts : self.num_seqs].unsqueeze(1)
            return lens.expand(-1, 1 + self.max_draft_tokens)

    return DrivenUncached


def attention_metadata(
    driven: Any, manager: KVCacheManager, draft_manager: Any, rows: int, tokens: int, index_topk: int, **trees: Any
) -> Any:
    """The metadata of eager steps; ``index_topk`` 0 for a dense backend, ``trees`` for the suite's own class only."""
    sparse = {"sparse_metadata_params": DSAMetadataParams(index_topk)} if index_topk else {}
    return driven(
        max_num_requests=rows,
        max_num_tokens=tokens,
        kv_cache_manager=manager,
        draft_kv_cache_manager=draft_manager,
        mapping=MappingStandIn(),
        **sparse,
        **trees,
    )


@dataclass
class _SpecMetadata:
    max_draft_len: int = 2
    runtime_tokens_per_gen_step: int = 3


def try_out(driven: Any, backend: str, device: torch.device) -> None:
    """Make an object of ``driven`` and lead it through a step of a context and a generation.

    Raises whatever a version raises that needs more than there is, ``ValueError`` when it fills its buffers otherwise.
    """
    sparse = BACKENDS[backend].sparse
    manager: KVCacheManager = (DSACacheManager if sparse else KVCacheManager)(
        num_layers=2,
        num_blocks=4,
        tokens_per_block=8,
        max_seq_len=16,
        max_total_draft_tokens=2,
        num_extra_kv_tokens=1,
        device=device,
    )
    prompts = tuple(LlmRequest(py_request_id=i, prompt=[0] * 5) for i in range(2))
    manager.prepare_resources(ScheduledRequests(context_requests=prompts))
    attn = attention_metadata(driven, manager, None, 2, 16, 4 if sparse else 0)
    attn.update_spec_dec_param(True, _SpecMetadata(), 2, 1)
    attn.seq_lens = torch.tensor([3, 3], dtype=torch.int32)
    attn.request_ids, attn.prompt_lens, attn.num_contexts = [0, 1], [3, 2], 1
    attn.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=[0, 2], num_extra_kv_tokens=1)
    attn.prepare()
    attn.on_update_kv_lens()
    _expect("kv_lens_cuda", attn.kv_lens_cuda[:2], [3, 5])
    _expect("host_request_types", attn.host_request_types[:2], [0, 1])
    if sparse:
        _expect("req_idx_per_token", attn.req_idx_per_token[:6], [0, 0, 0, 1, 1, 1])
    attn.update_for_spec_dec()


def _expect(name: str, tensor: torch.Tensor, values: list[int]) -> None:
    if tensor.tolist() != values:
        raise ValueError(f"{name} is {tensor.tolist()} and not {values} after a step was prepared")
