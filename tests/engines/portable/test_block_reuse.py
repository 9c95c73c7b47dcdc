"""Pages that are known: who has them, who gets them, and when nobody does."""

from __future__ import annotations

import pytest

from engines.portable.pyexecutor.block_reuse import ReusableBlocks, find_reused_tokens
from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2
from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from scenarios.tracer import EMPTY
from tests.engines.portable.support import kv_cache_manager

PROMPT = [*range(1, 11)]
VERSIONS = (KVCacheManager, KVCacheManagerV2)


def blocks(manager: KVCacheManager) -> ReusableBlocks:
    assert manager.reusable_blocks is not None
    return manager.reusable_blocks


def managed(version: type, num_blocks: int = 8) -> KVCacheManager:
    return kv_cache_manager(
        num_blocks=num_blocks, extra=0, version=version, enable_block_reuse=True, reuse_look_ahead=1
    )


def served(manager: KVCacheManager, request_id: int, prompt: list[int]) -> LlmRequest:
    """A request whose prompt has been computed, on whatever of it is known."""
    request = LlmRequest(request_id, prompt, context_chunk_size=len(prompt))
    request.set_prepopulated_prompt_len(find_reused_tokens([blocks(manager)], request))
    manager.prepare_resources(ScheduledRequests((request,)))
    request.move_to_next_context_chunk()
    manager.store_blocks_for_reuse(request)
    return request


@pytest.mark.parametrize("version", VERSIONS)
def test_a_prompt_claims_what_is_known_and_computes_the_rest(version: type) -> None:
    manager = managed(version)
    served(manager, 0, PROMPT)
    manager.kv_cache_pools.fill_(7)
    second = served(manager, 1, [*PROMPT, 11])
    first, mine = manager.get_block_ids(0), manager.get_block_ids(1)
    assert (second.prepopulated_prompt_len, second.context_current_position, second.context_chunk_size) == (8, 11, 3)
    assert (first[:2], len(set(first + mine))) == (mine[:2], 4)
    assert manager.get_num_tokens(1) == 11
    # Granted pages are emptied, and these alone.
    assert manager.kv_cache_pools[0, mine].tolist() == [[7] * 4, [7] * 4, [EMPTY] * 4]
    assert [block.owners for block in blocks(manager).known().values()] == [2, 2]
    assert manager.get_block_table([1])[0, :3].tolist() == mine


@pytest.mark.parametrize("version", VERSIONS)
def test_a_page_is_free_when_its_last_owner_has_gone_and_is_taken_last(version: type) -> None:
    manager = managed(version, num_blocks=5)
    first, second = served(manager, 0, PROMPT), served(manager, 1, PROMPT)
    known = manager.get_block_ids(0)[:2]
    manager.free_resources(first)
    assert (manager.get_num_free_blocks(), blocks(manager).reclaim_order()) == (2, [])
    manager.free_resources(second)
    assert (manager.get_num_free_blocks(), blocks(manager).reclaim_order()) == (5, known[::-1])
    served(manager, 2, [30] * 13)
    assert blocks(manager).reclaim_order() == known[:1]
    assert blocks(manager).find(PROMPT) == known[:1]


def test_the_first_page_of_a_kind_stays_the_known_one() -> None:
    manager = managed(KVCacheManager)
    requests = [LlmRequest(i, PROMPT, context_chunk_size=10) for i in (0, 1)]
    manager.prepare_resources(ScheduledRequests(tuple(requests)))
    for request in requests:
        manager.store_blocks_for_reuse(request)
    assert blocks(manager).find(PROMPT) == manager.get_block_ids(0)[:2]
    manager.free_resources(requests[1])
    assert len(blocks(manager)) == 0
    manager.free_resources(requests[0])
    assert len(blocks(manager)) == 2


def test_all_is_forgotten() -> None:
    manager = managed(KVCacheManager)
    manager.free_resources(served(manager, 0, PROMPT))
    manager.reset_reuse_state()
    assert (blocks(manager).known(), blocks(manager).find(PROMPT), manager.get_num_free_blocks()) == ({}, [], 8)


@pytest.mark.parametrize(("sizes", "expected"), [((4,), 8), ((4, 2), 8), ((4, 3), 0), ((2, 3), 6), ((3, 4, 2), 0)])
def test_reused_tokens_are_whole_pages_of_every_pool(sizes: tuple[int, ...], expected: int) -> None:
    pools = [ReusableBlocks(size, look_ahead=0) for size in sizes]
    for pool in pools:
        pool.store(PROMPT, range(10))
    assert find_reused_tokens(pools, LlmRequest(0, PROMPT)) == expected
