"""The ledger of tokens and pages."""

from __future__ import annotations

import pytest

from engines.portable.pyexecutor.llm_request import LlmRequest, ScheduledRequests
from scenarios.tracer import EMPTY
from tests.engines.portable.support import kv_cache_manager


def generation(past: int, drafts: int, request_id: int = 0) -> LlmRequest:
    return LlmRequest(request_id, [1] * past, generated=[1], py_draft_tokens=[0] * drafts)


def test_a_prompt_is_granted_whole_with_its_first_chunk() -> None:
    manager = kv_cache_manager(extra=2)
    request = LlmRequest(0, [1] * 10, context_chunk_size=4, py_draft_tokens=[0] * 3)
    batch = ScheduledRequests((request,))
    manager.prepare_resources(batch)
    assert manager.get_num_tokens(0) == 15
    request.context_current_position = 4
    manager.prepare_resources(batch)
    assert manager.get_num_tokens(0) == 15
    assert len(manager.get_block_ids(0)) == 4


def test_a_graph_dummy_gets_past_extra_and_rows() -> None:
    manager = kv_cache_manager(extra=2)
    request = generation(past=3, drafts=3)
    manager.add_dummy_requests([request])
    manager.prepare_resources(ScheduledRequests((), (request,)))
    assert manager.get_num_tokens(0) == 9


@pytest.mark.parametrize(("accepted_drafts", "gain"), [(0, 1), (1, 2), (3, 4)])
def test_a_generation_gains_what_it_accepts(accepted_drafts: int, gain: int) -> None:
    manager = kv_cache_manager(extra=2)
    request = generation(past=9, drafts=3)
    batch = ScheduledRequests((), (request,))
    manager.add_dummy_requests([request])
    before, pages = manager.get_num_tokens(0), list(manager.get_block_ids(0))
    manager.prepare_resources(batch)
    request.py_rewind_len = 3 - accepted_drafts
    manager.update_resources(batch)
    assert manager.get_num_tokens(0) == before + gain
    assert manager.get_block_ids(0)[: len(pages)] == pages
    assert len(manager.get_block_ids(0)) == -(-(before + gain) // 4)


def test_pages_have_one_owner_and_come_back() -> None:
    manager = kv_cache_manager(num_blocks=8, extra=0)
    requests = [generation(past, 0, i) for i, past in enumerate((5, 9, 4))]
    manager.add_dummy_requests(requests)
    owned = [page for i in range(3) for page in manager.get_block_ids(i)]
    assert len(set(owned)) == len(owned) == 6
    assert manager.get_num_free_blocks() == 2
    for request in requests:
        manager.free_resources(request)
        manager.free_resources(request)
    assert manager.get_num_free_blocks() == 8
    assert (manager.get_num_tokens(1), manager.get_block_ids(1)) == (0, [])


def test_granted_pages_are_emptied_in_every_pool() -> None:
    manager = kv_cache_manager(num_blocks=4, extra=0)
    first, second = generation(8, 0, 0), generation(4, 0, 1)
    manager.add_dummy_requests([first])
    manager.kv_cache_pools.fill_(7)
    manager.free_resources(first)
    manager.add_dummy_requests([second])
    (page,) = manager.get_block_ids(1)
    assert manager.kv_cache_pools[:, page].tolist() == [[EMPTY] * 4] * 2
    assert manager.kv_cache_pools.count_nonzero() == 2 * 3 * 4


def test_an_exhausted_pool_loses_no_page() -> None:
    manager = kv_cache_manager(num_blocks=2, extra=0)
    request = generation(9, 0)
    with pytest.raises(RuntimeError, match="request 0 needs a page"):
        manager.add_dummy_requests([request])
    manager.free_resources(request)
    assert manager.get_num_free_blocks() == 2


def test_tables_are_wide_enough_for_the_longest_request() -> None:
    manager = kv_cache_manager()
    assert manager.max_blocks_per_seq * manager.tokens_per_block >= manager.max_seq_len + 7
