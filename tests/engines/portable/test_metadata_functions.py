"""Functions of the metadata that no scenario varies enough, against the oracle's, over random inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.portable.attention.backends.context_mla import plan_chunks
from engines.portable.attention.backends.sparse.dsa.cache_manager import DSACacheManager
from engines.portable.attention.backends.sparse.dsa.dsl_topk import pick_split
from engines.portable.attention.backends.sparse.dsa.indexer import slots_of
from engines.portable.attention.backends.sparse.dsa.metadata import dense_topk
from engines.portable.attention.backends.sparse.dsa.prefill import IndexerParams, split_prefill_chunks
from engines.portable.attention.backends.trtllm import linear_packed_mask
from engines.portable.memory_buffer_utils import Buffers
from reference.buffer_pool import Asked, blocks
from reference.context_mla import chunk_plan
from reference.dense_selection import dense
from reference.flash_infer import FlashInferRow, page_tables, shared_kv_lens
from reference.indexer_cache import IndexerPages
from reference.indexer_prefill import Chunk, new_keys, prefill_chunks, windows
from reference.indexer_schedule import split
from reference.spec_decoding_tables import linear_mask
from tests.engines.portable.metadata import flashinfer

CPU = torch.device("cpu")
ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5)
"""Cached tokens and query of each row."""


@given(st.integers(1, 8), st.booleans(), st.lists(st.permutations(range(6)), min_size=1, max_size=3), st.data())
def test_slots(size: int, fp4: bool, pages: list[list[int]], data: st.DataObject) -> None:
    manager = DSACacheManager(
        num_layers=1,
        num_blocks=6,
        tokens_per_block=size,
        max_seq_len=6 * size,
        max_total_draft_tokens=1,
        num_extra_kv_tokens=1,
        device=CPU,
        use_fp4=fp4,
    )
    tokens = data.draw(st.lists(st.tuples(st.integers(0, len(pages) - 1), st.integers(0, 6 * size - 1)), min_size=1))
    rows, positions = (torch.tensor(column) for column in zip(*tokens, strict=True))
    found = slots_of(positions, torch.tensor(pages, dtype=torch.int32), rows, manager)
    layout = IndexerPages(size, 128, fp4=fp4)
    expected = [layout.slot(pages[row], position) for row, position in tokens]
    assert list(zip(*(part.tolist() for part in found), strict=True)) == expected


@given(ROWS, st.integers(1, 12), st.sampled_from([1, 4]), st.data())
def test_windows_and_pieces_of_contexts(
    rows: list[tuple[int, int]], longest: int, ratio: int, data: st.DataObject
) -> None:
    num_contexts = data.draw(st.integers(1, len(rows)))
    cached, queries = (torch.tensor(column) for column in zip(*rows, strict=True))
    params = IndexerParams(queries, cached, ratio)
    contexts = [Chunk(*row) for row in rows[:num_contexts]]
    found = list(zip(*(part.tolist() for part in params.windows(num_contexts)), strict=True))
    assert found == windows(contexts, ratio)
    keys = [new_keys(Chunk(*row), ratio) for row in rows]
    assert params.new_kv.tolist() == [len(of_row) for of_row in keys]
    owners, places = params.positions()
    expected = [(row, key) for row, of_row in enumerate(keys) for key in of_row]
    assert list(zip(owners.tolist(), places.tolist(), strict=True)) == expected
    pieces = [
        (
            (piece.token_start, piece.token_end),
            (piece.k_token_start, piece.k_token_end),
            list(zip(piece.cu_seqlen_ks.tolist(), piece.cu_seqlen_ke.tolist(), strict=True)),
        )
        for piece in split_prefill_chunks(params, num_contexts, longest)
    ]
    assert pieces == [tuple(piece) for piece in prefill_chunks(contexts, longest, ratio)]


@given(ROWS, st.integers(1, 32))
def test_dense_rows(rows: list[tuple[int, int]], topk: int) -> None:
    kv_lens = torch.tensor([past + query for past, query in rows], dtype=torch.int32)
    queries = torch.tensor([query for _, query in rows], dtype=torch.int32)
    found = dense_topk(kv_lens, queries, int(queries.sum()), topk)
    expected = [dense(place, topk) for past, query in rows for place in range(past, past + query)]
    assert found.tolist() == [row + [-1] * (topk - len(row)) for row in expected]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 9))
def test_chunk_plans(cached: list[int], total: int) -> None:
    found, plan = plan_chunks(cached, total), chunk_plan(cached, total)
    assert (found.chunked_seq_len, found.chunked_global_offset, found.merge_op) == tuple(plan)
    assert found.max_chunk_len_per_loop == [max(row) for row in plan.lengths]
    sums = [[sum(row[:i]) for i in range(len(cached) + 1)] for row in plan.lengths]
    assert found.cu_chunked_seq_len == sums


@given(st.integers(1, 12), st.sampled_from([(1, 2, 3), (1, 2, 3, 4)]), st.integers(1, 64), st.integers(1, 9000))
def test_splits(next_n: int, atoms: tuple[int, ...], generations: int, longest: int) -> None:
    expected = split(next_n, atoms, generations=generations, longest=longest, num_sms=148)
    assert pick_split(next_n, atoms, generations, longest, 148) == expected


@pytest.mark.parametrize("width", [1, 4, 31, 32, 33, 64, 65])
def test_linear_masks(width: int) -> None:
    assert linear_packed_mask(width).tolist() == linear_mask(width)


@given(ROWS, st.data())
def test_page_tables(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    num_contexts = data.draw(st.integers(0, len(rows)))
    cached, queries = (list(column) for column in zip(*rows, strict=True))
    metadata = flashinfer(queries, cached, num_contexts, tokens_per_block=8)
    count, generations = len(rows), len(rows) - num_contexts
    expected = page_tables([FlashInferRow(*row) for row in rows], num_contexts, 8)
    assert metadata._qo_indptr[: count + 1].tolist() == expected.qo_indptr
    assert metadata._paged_kv_indptr_prefill[: num_contexts + 1].tolist() == expected.paged_kv_indptr_prefill
    assert metadata._paged_kv_indptr_decode[: generations + 1].tolist() == expected.paged_kv_indptr_decode
    assert metadata._paged_kv_last_page_len[:count].tolist() == expected.paged_kv_last_page_len
    assert metadata._cached_token_lens[:count].tolist() == expected.cached_token_lens
    assert metadata._batch_indices[: sum(queries)].tolist() == expected.batch_indices
    assert metadata._positions[: sum(queries)].tolist() == expected.positions
    accepted = data.draw(st.tuples(*(st.integers(1, query) for query in queries)))
    view = metadata.get_draft_metadata()
    view.update_shared_kv_draft_lengths(metadata, torch.tensor(accepted), num_contexts)
    lengths = shared_kv_lens([FlashInferRow(*row) for row in rows], accepted, num_contexts)
    assert view._draft_kv_runtime_lens[:count].tolist() == lengths


@given(st.lists(st.builds(Asked, st.integers(1, 8), st.booleans()), min_size=1, max_size=8))
def test_buffers_that_share_storage(asked: list[Asked]) -> None:
    pool = Buffers(CPU)
    # All are kept, so that no storage is used twice by chance.
    buffers = [pool.get_buffer((size,), torch.uint8, "kv_lens", reserve) for size, reserve in asked]
    places = [buffer.data_ptr() for buffer in buffers]
    assert [places.index(place) for place in places] == blocks(asked)
