"""What the DSA metadata derives from layout and lengths: by ``prepare`` on the host, by its hooks on the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engines.portable.attention.backends.interface import KVCacheParams
from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.indexer import slots_of, transform_local_topk_and_prepare_pool_view
from engines.portable.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from scenarios.tracer import EMPTY
from tests.engines.portable.metadata import collapse, written
from tests.engines.portable.support import CPU, ints

MAPS = ("req_idx_per_token", "slot_mapping_fp8", "slot_mapping_scale")
TOTALS = ("gen_kv_indptr", "gen_cached_token_indptr")


def manager(tokens_per_block: int = 4, num_blocks: int = 64) -> DSACacheManager:
    """A manager for requests of up to 64 tokens."""
    return DSACacheManager(
        num_layers=2, num_blocks=num_blocks, tokens_per_block=tokens_per_block, max_seq_len=64,
        max_total_draft_tokens=4, num_extra_kv_tokens=3, device=CPU,
    )  # fmt: skip


def prepared(query: list[int], cached: list[int], contexts: int, **options: Any) -> DSAtrtllmAttentionMetadata:
    """Metadata of rows with these lengths, the first of them contexts; K is at most 4."""
    cache = manager(**options)
    rows = [
        LlmRequest(i, [1] * (c + q))
        if i < contexts
        else LlmRequest(i, [1] * c, generated=[1], py_draft_tokens=[0] * (q - 1))
        for i, (q, c) in enumerate(zip(query, cached))
    ]
    cache.add_dummy_requests(rows[contexts:])
    cache.prepare_resources(ScheduledRequests(tuple(rows[:contexts]), tuple(rows[contexts:])))
    attn = DSAtrtllmAttentionMetadata(
        max_num_requests=8, max_num_tokens=64, device=CPU, kv_cache_manager=cache, max_total_draft_tokens=4,
        max_draft_tokens=4,
    )  # fmt: skip
    attn.seq_lens = ints(query)
    attn.request_ids, attn.prompt_lens = list(range(len(query))), [1] * len(query)
    attn.num_contexts = contexts
    attn.kv_cache_params = KVCacheParams(True, cached, 3)
    attn.prepare()
    return attn


def content(attn: Any, names: tuple[str, ...]) -> list[list[int]]:
    """The part of each map that is in use."""
    return [getattr(attn, name)[: attn.num_tokens].tolist() for name in names]


def test_slots_name_bytes_of_data_and_of_scales() -> None:
    positions = ints([0, 63, 64, 130, 5], torch.int64)
    rows = ints([0, 0, 0, 0, 1])
    data, scales = slots_of(positions, ints([[7, 3, 9], [1, 0, 0]]), rows, manager(tokens_per_block=64))
    assert data.tolist() == [59136, 67200, 25344, 76288, 8448 + 5 * 128]
    assert scales.tolist() == [67328, 67580, 33536, 84232, 8448 + 64 * 128 + 20]
    tokens = manager(tokens_per_block=64).get_indexer_slots(data)
    assert tokens.tolist() == [7 * 64, 7 * 64 + 63, 3 * 64, 9 * 64 + 2, 64 + 5]


def test_positions_outside_the_table_are_put_into_its_nearest_page() -> None:
    data, _ = slots_of(ints([-1, 12], torch.int64), ints([[7, 3, 9]]), ints([0, 0]), manager())
    assert data.tolist() == [7 * 528 + 3 * 128, 9 * 528]


@pytest.mark.parametrize("seed", range(20))
def test_the_hook_agrees_with_prepare(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 5)
    contexts = rng.randint(0, n)
    query = [rng.randint(1, 6) if i < contexts else 4 for i in range(n)]
    attn = prepared(query, [rng.randint(0, 20) for _ in range(n)], contexts)
    by_host = content(attn, MAPS)
    for name in MAPS:
        getattr(attn, name).fill_(-5)
    attn.on_update_kv_lens()
    assert content(attn, MAPS) == by_host
    assert by_host[0] == [row for row, count in enumerate(query) for _ in range(count)]


def test_prepare_writes_totals_and_lengths_of_the_generations() -> None:
    attn = prepared([5, 4, 4], [0, 10, 20], 1)
    assert attn.gen_kv_indptr[:3].tolist() == [0, 14, 38]
    assert attn.gen_cached_token_indptr[:3].tolist() == [0, 10, 30]
    assert attn.kv_lens_cuda_2d[:2].tolist() == [[14] * 5, [24] * 5]
    assert attn.max_gen_seq_len == 4
    assert prepared([3, 2], [0, 0], 2).max_gen_seq_len == 0


def test_a_draft_loop_is_followed() -> None:
    """PR #16925: a context of 5 and generations with 10 and 20 tokens cached, of which 2 and 4 are accepted; K = 3."""
    attn = prepared([5, 4, 4], [0, 10, 20], 1)
    assert written(attn) == [*((0, i) for i in range(5)), *((1, i) for i in range(10, 14)),
                             *((2, i) for i in range(20, 24))]  # fmt: skip
    collapse(attn, [6, 13, 25])
    assert content(attn, MAPS[:1]) == [[0, 1, 2]]
    assert written(attn) == [(0, 5), (1, 12), (2, 24)]
    assert attn.gen_kv_indptr[:4].tolist() == [0, 6, 19, 44]
    assert attn.gen_cached_token_indptr[:4].tolist() == [0, 5, 17, 41]
    assert attn.kv_lens_cuda_2d[:3].tolist() == [[6] * 5, [13] * 5, [25] * 5]
    assert attn.max_gen_seq_len == 1
    attn.kv_lens_cuda[:3].add_(1)
    attn.update_for_spec_dec()
    assert written(attn) == [(0, 6), (1, 13), (2, 25)]


def test_lengths_by_which_rows_differ_and_tokens_that_no_row_has() -> None:
    attn = prepared([3, 1, 4, 1], [0, 2, 0, 5], 4)
    assert content(attn, MAPS[:1]) == [[0, 0, 0, 1, 2, 2, 2, 2, 3]]
    attn._seq_lens_cuda.copy_(ints([2, 0, 1, 3]))
    attn.on_update_kv_lens()
    assert content(attn, MAPS[:1]) == [[0, 0, 2, 3, 3, 3, 3, 3, 3]]


def test_tables_end_with_what_the_draft_loop_may_append() -> None:
    """Upstream's ends with the target's lengths; 8 tokens fill two pages, and drafts go on to the third."""
    attn = prepared([4, 4], [4, 7], 0)
    pages = [attn.kv_cache_manager.get_block_ids(i) for i in range(2)]
    table = attn.block_table[:2].tolist()
    assert table == [[*pages[0][:3], *[-1] * 14], [*pages[1][:4], *[-1] * 13]]
    keys = attn.indexer_k_cache_block_offsets[:2].tolist()
    assert [row[: len(owned)] for row, owned in zip(keys, pages)] == pages
    assert min(map(min, keys)) >= 0


def test_selected_tokens_are_read_through_the_pages_of_the_row_that_the_map_names() -> None:
    attn = prepared([2, 4], [3, 9], 1)
    (first, *_), second = attn.block_table[0].tolist(), attn.block_table[1].tolist()
    indices = ints([[0, 3, -1, 50]] * 2 + [[5, -2, 9, 68]] * 4, torch.int64)
    slots = transform_local_topk_and_prepare_pool_view(indices, attn).tolist()
    assert slots[:2] == [[first * 4, first * 4 + 3, -1, -1]] * 2
    assert slots[2:] == [[second[1] * 4 + 1, -1, second[2] * 4 + 1, -1]] * 4
    swapped = prepared([2, 4], [3, 9], 0)
    swapped.req_idx_per_token[:6].copy_(ints([1, 1, 0, 0, 0, 0]))
    rows = transform_local_topk_and_prepare_pool_view(ints([[0]] * 6, torch.int64), swapped).flatten().tolist()
    first_pages = swapped.block_table[:2, 0].tolist()
    assert rows == [first_pages[1] * 4] * 2 + [first_pages[0] * 4] * 4


def test_what_the_layers_share_is_made_once_per_forward() -> None:
    attn = prepared([5, 4, 4], [0, 10, 20], 1)
    attn._ensure_pool_view_cached()
    snapshot = attn._cached_req_idx_gen
    assert snapshot.tolist() == [0] * 4 + [1] * 4
    attn._ensure_pool_view_cached()
    assert attn._cached_req_idx_gen is snapshot
    collapse(attn, [6, 13, 25])
    attn._ensure_pool_view_cached()
    assert attn._cached_req_idx_gen.tolist() == [0, 1, 2]
    assert attn._cached_block_table_gen.shape[0] == 3
    assert snapshot.tolist() == [0] * 4 + [1] * 4


def test_the_metadata_of_a_graph_has_maps_of_its_own() -> None:
    attn = prepared([5, 5], [4, 7], 0)
    graph: Any = attn.create_cuda_graph_metadata(2, max_draft_tokens=4)
    for name in (*MAPS, *TOTALS, "block_table", "indexer_k_cache_block_offsets", "kv_lens_cuda_2d"):
        mine, other = getattr(attn, name), getattr(graph, name)
        assert mine.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)


def test_a_granted_page_holds_no_keys() -> None:
    cache = manager(num_blocks=4)
    for layer in range(2):
        cache.get_buffers(layer).fill_(1)
        cache.get_indexer_k_cache_buffers(layer).fill_(2)
    request = LlmRequest(0, [1] * 4)
    cache.prepare_resources(ScheduledRequests((request,), ()))
    owned = cache.get_block_ids(0)
    for layer in range(2):
        for pool, kept in ((cache.get_buffers(layer), 1), (cache.get_indexer_k_cache_buffers(layer), 2)):
            assert pool[owned].unique().tolist() == [EMPTY]
            assert pool[[i for i in range(4) if i not in owned]].unique().tolist() == [kept]
