"""Attention metadata of each backend, prepared for a batch of given lengths."""

from __future__ import annotations

from functools import partial
from typing import Any

from engines.portable.attention.backends.flashinfer import FlashInferAttentionMetadata
from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.attention.backends.sparse.deepseek_v4.cache_manager import DeepseekV4CacheManager
from engines.portable.attention.backends.sparse.deepseek_v4.metadata import DeepseekV4TrtllmAttentionMetadata
from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from engines.portable.attention.backends.sparse.dsa.params import DSAMetadataParams
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from tests.engines.portable.support import CPU, ints


def cache(
    manager_class: Any,
    query: list[int],
    cached: list[int],
    contexts: int,
    *,
    extra: int,
    tokens_per_block: int = 8,
) -> Any:
    """A manager that has granted requests 0, 1, ... what a step of these lengths needs."""
    manager: KVCacheManager = manager_class(
        num_layers=2, num_blocks=256, tokens_per_block=tokens_per_block, max_seq_len=256, max_total_draft_tokens=4,
        num_extra_kv_tokens=extra, device=CPU,
    )  # fmt: skip
    rows = [
        LlmRequest(i, [1] * (c + q))
        if i < contexts
        else LlmRequest(i, [1] * c, generated=[1], py_draft_tokens=[0] * (q - 1))
        for i, (q, c) in enumerate(zip(query, cached))
    ]
    manager.add_dummy_requests(rows[contexts:])
    manager.prepare_resources(ScheduledRequests(tuple(rows[:contexts]), tuple(rows[contexts:])))
    return manager


def prepare(attn: Any, query: list[int], cached: list[int], contexts: int, extra: int) -> Any:
    """What the engine's input preparation does."""
    if not attn.is_cuda_graph:
        attn.seq_lens = ints(query)
    attn.num_contexts = contexts
    attn.request_ids, attn.prompt_lens = list(range(len(query))), [1] * len(query)
    attn.kv_cache_params = KVCacheParams(True, cached, extra)
    attn.prepare()
    return attn


def made(attn_class: Any, manager: Any, **options: Any) -> Any:
    """Metadata for at most 8 rows and 128 tokens."""
    return attn_class(max_num_requests=8, max_num_tokens=128, device=CPU, kv_cache_manager=manager, **options)


def trtllm(query: list[int], cached: list[int], contexts: int, *, extra: int = 3, **options: Any) -> Any:
    """Metadata of the TRTLLM backend."""
    manager = cache(KVCacheManager, query, cached, contexts, extra=extra)
    attn = made(TrtllmAttentionMetadata, manager, max_total_draft_tokens=4, **options)
    return prepare(attn, query, cached, contexts, extra)


def dsa(query: list[int], cached: list[int], contexts: int, *, extra: int = 3, **options: Any) -> Any:
    """Metadata of the DSA backend, of at most 4 drafts."""
    manager = cache(DSACacheManager, query, cached, contexts, extra=extra)
    attn = made(DSAtrtllmAttentionMetadata, manager, max_total_draft_tokens=4, max_draft_tokens=4, **options)
    return prepare(attn, query, cached, contexts, extra)


def deepseek_v4(query: list[int], cached: list[int], contexts: int, *, extra: int = 3, **params: Any) -> Any:
    """Metadata of the DEEPSEEK_V4 backend with ratios 1, 2 and 4 and a window of 3 tokens, of at most 4 drafts."""
    ratios = (1, 2, 4)
    manager = cache(partial(DeepseekV4CacheManager, compress_ratios=ratios), query, cached, contexts, extra=extra)
    sparse = DSAMetadataParams(
        index_topk=2, skip_indexer_for_short_seqs=False, compress_ratios=ratios, window_size=3, **params
    )
    attn = made(
        DeepseekV4TrtllmAttentionMetadata,
        manager,
        max_total_draft_tokens=4,
        max_draft_tokens=4,
        sparse_metadata_params=sparse,
    )
    return prepare(attn, query, cached, contexts, extra)


def flashinfer(
    query: list[int], cached: list[int], contexts: int, *, extra: int = 3, tokens_per_block: int = 8
) -> FlashInferAttentionMetadata:
    """Metadata of the FLASHINFER backend."""
    manager = cache(KVCacheManager, query, cached, contexts, extra=extra, tokens_per_block=tokens_per_block)
    attn: FlashInferAttentionMetadata = made(FlashInferAttentionMetadata, manager)
    return prepare(attn, query, cached, contexts, extra)  # type: ignore[no-any-return]


def collapse(attn: Any, kv_lens: list[int], tokens: int = 1) -> None:
    """What a draft loop does after its first forward: so many tokens per row, all rows generations."""
    attn.prepare_for_spec_dec("_seq_lens", "_seq_lens_cuda")
    attn._seq_lens.fill_(tokens)
    attn._seq_lens_cuda.fill_(tokens)
    attn.num_contexts = 0
    step_of(attn, kv_lens)


def step_of(attn: Any, kv_lens: list[int]) -> None:
    """What it does after each: other lengths."""
    attn.kv_lens_cuda[: len(kv_lens)].copy_(ints(kv_lens))
    attn.update_for_spec_dec()


def written(attn: Any) -> list[tuple[int, int]]:
    """(request, position) of the key that each token writes."""
    manager, size = attn.kv_cache_manager, attn.kv_cache_manager.tokens_per_block
    owners = {p: (i, j) for i in attn.request_ids for j, p in enumerate(manager.get_block_ids(i))}
    slots = manager.get_indexer_slots(attn.slot_mapping_fp8[: attn.num_tokens]).tolist()
    return [(owners[s // size][0], owners[s // size][1] * size + s % size) for s in slots]
