"""A drafter's KV cache of its own, both versions of managers, pages that move: what no oracle says of them."""

from __future__ import annotations

import pytest
import torch

from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata
from engines.portable.pyexecutor.host_offload import HostOffload
from engines.portable.pyexecutor.kv_cache_manager_v2 import BAD_PAGE_INDEX, KVCacheManagerV2
from engines.portable.pyexecutor.llm_request import LlmRequest
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.speculative.draft_kv_cache import draft_kv_cache_context
from tests.engines.portable.support import CPU, ints, kv_cache_manager


def options(**more: int) -> dict[str, object]:
    sizes = {"num_layers": 1, "num_blocks": 8, "tokens_per_block": 4, "max_seq_len": 16}
    return sizes | {"max_total_draft_tokens": 4, "num_extra_kv_tokens": 0, "device": CPU} | more


def test_the_metadata_refers_to_the_drafters_cache_for_so_long() -> None:
    draft = KVCacheManager(**options(first_layer=1, tokens_per_block=2))  # type: ignore[arg-type]
    attn = TrtllmAttentionMetadata(
        max_num_requests=2,
        max_num_tokens=8,
        device=CPU,
        kv_cache_manager=kv_cache_manager(),
        draft_kv_cache_manager=draft,
    )
    request = LlmRequest(0, [1] * 3, generated=[1])
    for manager in (attn.kv_cache_manager, draft):
        manager.add_dummy_requests([request])
    attn.seq_lens, attn.request_ids, attn.prompt_lens = ints([1]), [0], [3]
    attn.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=[3])
    attn.prepare()
    target = attn.kv_cache_manager, attn.kv_cache_block_offsets
    with pytest.raises(ZeroDivisionError), draft_kv_cache_context(attn):
        assert attn.kv_cache_manager is draft
        assert attn.kv_cache_block_offsets[0, 0, 0, :2].tolist() == draft.get_block_ids(0)
        with pytest.raises(KeyError):
            attn.kv_cache_manager.get_buffers(0)
        _ = 1 // 0
    assert (attn.kv_cache_manager, attn.kv_cache_block_offsets) == target
    assert attn.kv_cache_block_offsets is target[1]


def test_a_page_that_moves_keeps_its_id_and_what_it_holds() -> None:
    offload, free, pools = HostOffload(4), [3, 2], torch.arange(8).view(1, 4, 2)
    held = pools[0, offload.memory_pool_indices([0, 1])].tolist()
    for ids in ([4, 5], [6, 7], [3, 2]):
        offload.swap(free, pools)
        assert pools[0, offload.memory_pool_indices([0, 1])].tolist() == held
        assert free == ids
        assert {*offload.memory_pool_indices([0, 1, *free])} == {0, 1, 2, 3}
    assert offload.memory_pool_indices([0, 1]) == [3, 0]


def test_a_row_of_the_second_version_follows_the_capacity() -> None:
    manager, request = KVCacheManagerV2(**options()), LlmRequest(5, [1])
    for capacity, pages in ((9, 3), (5, 2), (12, 3), (0, 0)):
        manager.resize(request, capacity)
        ids = manager.get_block_ids(5)
        assert manager.get_block_table([5]).tolist() == [
            [*ids, *[BAD_PAGE_INDEX] * (manager.max_blocks_per_seq - pages)]
        ]
        assert (len(ids), manager.get_num_free_blocks()) == (pages, 8 - pages)
