"""FlashInfer's page tables, and the views of them that drafters read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engines.base import run
from engines.portable import PortableEngine
from engines.portable.graphs import CpuGraph
from engines.portable.pyexecutor.resource_manager import KVCacheManager
from engines.portable.speculative.config import DecodingConfig
from engines.portable.speculative.eagle3 import Eagle3OneModelWorker
from engines.portable.speculative.utils import MODES
from scenarios import Config, Context, Generation, Request, Scenario, Step, check
from tests.engines.portable.metadata import cache, flashinfer, prepare
from tests.engines.portable.support import attention_metadata, ints

ROWS: Any = ([5, 4, 4], [0, 6, 20], 1)
"""Lengths, cached tokens, contexts; pages of 8 tokens."""


def pages(attn: Any, count: int) -> list[int]:
    return attn._paged_kv_indices[:count].tolist()  # type: ignore[no-any-return]


def owned(attn: Any, *counts: int) -> list[int]:
    """The first pages of each request, so many of them."""
    ids = [attn.kv_cache_manager.get_block_ids(i)[:count] for i, count in enumerate(counts)]
    return [page for row in ids for page in row]


def test_prepare_writes_pages_and_running_totals() -> None:
    attn = flashinfer(*ROWS)
    assert attn.num_blocks == [1, 2, 3]
    assert pages(attn, 6) == owned(attn, 1, 2, 3)
    assert attn._qo_indptr[:4].tolist() == [0, 5, 9, 13]
    assert attn._paged_kv_indptr_prefill[:2].tolist() == [0, 1]
    assert attn._paged_kv_indptr_decode[:3].tolist() == [0, 2, 5]
    assert attn._paged_kv_indptr.tolist() == [0, 1, 3, 6]
    assert attn._paged_kv_last_page_len[:3].tolist() == [5, 2, 8]
    assert attn._cached_token_lens[:3].tolist() == [0, 6, 20]
    assert attn._batch_indices[:13].tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert attn._positions[:13].tolist() == [*range(5), *range(6, 10), *range(20, 24)]
    assert not hasattr(attn, "kv_lens_cuda")


def test_a_correction_moves_tokens_and_leaves_pages() -> None:
    """The host counted 4 tokens of a step in flight; 2 and 4 were accepted."""
    attn = flashinfer([5, 4, 4], [0, 14, 24], 1)
    attn.enable_overlap = True
    blocks, tables = list(attn.num_blocks), pages(attn, 8)
    for sign, first in ((1, 12), (-1, 14)):
        attn.apply_spec_decode_kv_lens_offsets(ints([-2, 0]) * sign, 2)
        assert attn._cached_token_lens[:3].tolist() == [0, first, 24]
        assert attn.kv_lens_of_pages().tolist() == [5, first + 4, 28]
        assert attn._positions[:13].tolist() == [*range(5), *range(first, first + 4), *range(24, 28)]
        assert attn._paged_kv_last_page_len[:3].tolist() == [5, (first + 3) % 8 + 1, 4]
    assert (attn.num_blocks, pages(attn, 8)) == (blocks, tables)


def test_planning_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = flashinfer(*ROWS)
    assert attn.num_plans == 1
    monkeypatch.setattr(CpuGraph, "recording", True)
    with pytest.raises(ValueError, match="cannot be planned while a graph is captured"):
        attn.prepare()


def test_a_graph_has_buffers_of_its_size_and_views_of_its_own() -> None:
    attn = flashinfer([4, 4], [6, 20], 0)
    view = attn.get_draft_metadata()
    graph = attn.create_cuda_graph_metadata(2, max_draft_tokens=3)
    assert (graph.max_num_requests, graph.max_num_tokens, len(graph._positions)) == (2, 8, 8)
    assert graph.seq_lens.tolist() == [4, 4]
    assert graph.create_cuda_graph_metadata(1) is graph
    assert attn.get_draft_metadata() is view
    assert graph._draft_metadata is None
    with pytest.raises(AssertionError, match="contexts or generations, not both"):
        prepare(graph, [4, 4], [6, 20], 1, 3)


def test_a_drafter_on_the_targets_cache_has_one_query_per_sequence() -> None:
    attn = flashinfer(*ROWS)
    view = attn.get_draft_metadata()
    assert attn.get_draft_metadata() is view
    assert (view.seq_lens.tolist(), view.num_contexts, view.num_generations) == ([1, 1, 1], 0, 3)
    assert (pages(view, 6), view.num_blocks) == (pages(attn, 6), attn.num_blocks)
    assert view._paged_kv_indptr[:4].tolist() == [0, 1, 3, 6]
    assert view._qo_indptr[:4].tolist() == [0, 1, 2, 3]
    assert view._cached_token_lens[:3].tolist() == view._draft_kv_runtime_lens[:3].tolist() == [5, 10, 24]  # type: ignore[index]
    view.update_shared_kv_draft_lengths(attn, ints([1, 3, 2]), 1)
    assert view._cached_token_lens[:3].tolist() == [5, 9, 22]
    assert view._paged_kv_last_page_len[:3].tolist() == [5, 1, 6]
    view.update_for_spec_dec()
    assert view._cached_token_lens[:3].tolist() == [5, 9, 22]
    assert (attn.seq_lens.tolist(), attn._cached_token_lens[:3].tolist()) == ([5, 4, 4], [0, 6, 20])
    with pytest.raises(RuntimeError, match="of the target's KV cache, not of its own"):
        attn.get_draft_metadata(attn.kv_cache_manager)


def test_a_drafter_on_a_cache_of_its_own_advances_lengths_as_every_draft_loop_does() -> None:
    attn = flashinfer(*ROWS)
    manager = cache(KVCacheManager, *ROWS, extra=7)
    manager._block_ids = {i: ids[::-1] for i, ids in manager._block_ids.items()}
    view: Any = attn.get_draft_metadata(manager)
    assert (view.kv_cache_manager, attn.kv_cache_manager is manager) == (manager, False)
    assert (view.seq_lens.tolist(), view.num_contexts) == ([5, 4, 4], 1)
    assert view.kv_lens_cuda is view._draft_kv_runtime_lens
    assert view.kv_lens_cuda[:3].tolist() == [5, 10, 24]
    assert pages(view, 6) == owned(view, 1, 2, 3)
    view._seq_lens.fill_(1)
    view._seq_lens_cuda.fill_(1)
    view.num_contexts = 0
    view.kv_lens_cuda[:3].copy_(ints([6, 9, 25]))
    view.update_for_spec_dec()
    granted = [len(manager.get_block_ids(i)) for i in range(3)]
    assert view.num_blocks == granted
    assert pages(view, sum(granted)) == owned(view, *granted)
    assert view._paged_kv_last_page_len[:3].tolist() == [6, 1, 1]
    assert view._cached_token_lens[:3].tolist() == view._positions[:3].tolist() == [5, 8, 24]
    assert view._batch_indices[:3].tolist() == [0, 1, 2]
    assert view._qo_indptr[:4].tolist() == [0, 1, 2, 3]
    table = view._paged_kv_indices
    view.update_for_spec_dec()
    assert view._paged_kv_indices is table


def test_a_view_follows_each_preparation_and_starts_anew_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = flashinfer([4, 4], [6, 20], 0)
    manager = cache(KVCacheManager, [4, 4], [6, 20], 0, extra=7)
    view: Any = attn.get_draft_metadata(manager)
    prepare(attn, [4, 4], [9, 21], 0, 3)
    assert view.kv_lens_cuda[:2].tolist() == [13, 25]
    assert view._seq_lens is not attn._seq_lens
    for capturing in (False, True):
        monkeypatch.setattr(CpuGraph, "recording", False)
        view._seq_lens.fill_(1)
        view._seq_lens_cuda.fill_(1)
        view.num_contexts = 0
        view.kv_lens_cuda[:2].copy_(ints([12, 23]))
        view.update_for_spec_dec()
        assert view._positions[:2].tolist() == [11, 22]
        monkeypatch.setattr(CpuGraph, "recording", capturing)
        assert attn.get_draft_metadata(manager) is view
        assert (view.seq_lens.tolist(), view.seq_lens_cuda.tolist(), view.num_tokens) == ([4, 4], [4, 4], 8)
        assert view.kv_lens_cuda[:2].tolist() == [13, 25]
        assert view._paged_kv_last_page_len[:2].tolist() == [5, 1]
        assert view._cached_token_lens[:2].tolist() == [9, 21]
        assert view._positions[:8].tolist() == [*range(9, 13), *range(21, 25)]
        assert view._qo_indptr[:3].tolist() == [0, 4, 8]
    assert attn.seq_lens.tolist() == [4, 4]


def test_lengths_and_tables_are_read_out_of_the_arrays() -> None:
    attn = flashinfer(*ROWS)
    assert attn.kv_lens_of_pages().tolist() == [5, 10, 24]
    table = attn.page_table()
    used = [attn.kv_cache_manager.get_block_ids(i)[:count] for i, count in enumerate((1, 2, 3))]
    assert [[page for page in row if page >= 0] for row in table.tolist()] == used
    view = attn.get_draft_metadata()
    view.update_shared_kv_draft_lengths(attn, ints([1, 3, 2]), 1)
    assert view.kv_lens_of_pages().tolist() == [5, 9, 22]
    assert view.page_table().tolist() == table.tolist()


def test_a_drafter_without_a_cache_asks_for_views() -> None:
    config = DecodingConfig(
        spec_dec_mode=MODES["Eagle3OneModelWorker"],
        max_draft_len=2,
        num_extra_kv_tokens=0,
        mask_token_id=0,
        use_shared_kv_cache=True,
    )
    spec: Any = SimpleNamespace(runtime_draft_len=2)
    with pytest.raises(TypeError, match="TrtllmAttentionMetadata'> has none"):
        Eagle3OneModelWorker(config)._forward_impl(*[None] * 4, attention_metadata(), spec, None)  # type: ignore[arg-type]


def test_requests_that_share_pages_list_more_than_the_pool_has() -> None:
    fields: dict[str, Any] = {"attention_backend": "FLASHINFER", "num_blocks": 16, "enable_block_reuse": True}
    first = Request(id=0, prompt_len=13)
    others = tuple(Request(id=i, prompt_len=13, prefix_of=0, prefix_len=13) for i in range(1, 4))
    steps = (
        Step(draft_len=3, contexts=(Context(request=0, chunk=13),)),
        Step(draft_len=3, contexts=tuple(Context(request=r.id, chunk=13) for r in others)),
        Step(draft_len=3, generations=tuple(Generation(request=i) for i in range(4))),
    )
    config = Config(worker="SAWorker", max_draft_len=3, **fields)
    trace = run(PortableEngine(), check(Scenario(config=config, requests=(first, *others), steps=steps)))
    assert [step.outcome for step in trace.steps] == ["ok"] * 3
    prepared = trace.steps[-1].find("prepared")
    assert prepared is not None
    listed = [page for row in prepared["_paged_kv_indices"] for page in row]
    assert len(listed) > 16 >= len(set(listed))
