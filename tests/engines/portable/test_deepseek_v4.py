"""Compressed attention: counts and indices of each forward, where tokens go, and tensors against the definition."""

from __future__ import annotations

import random

import pytest
import torch

from engines.compressed_tracer import Columns, CompressedTracer
from scenarios.tracer import EMPTY, MASK_TOKEN, choose, compress, compressed_digest, entry, term
from tests.engines.portable.metadata import collapse, deepseek_v4, step_of
from tests.engines.portable.support import CPU, ints

ROWS = [3, 4], [5, 10], 1
"""A chunk of a prompt after 5 tokens, and a generation after 10."""


def test_a_step_adds_the_compressed_tokens_that_its_tokens_complete() -> None:
    attn = deepseek_v4(*ROWS)
    assert {r: lens[:2].tolist() for r, lens in attn.past_kv_lens.items()} == {1: [5, 10], 2: [2, 5], 4: [1, 2]}
    assert {r: lens[:2].tolist() for r, lens in attn.compressed_kv_lens.items()} == {1: [8, 14], 2: [4, 7], 4: [2, 3]}
    assert {r: t[:3].tolist() for r, t in attn.cu_new_comp_kv.items()} == {1: [0, 3, 7], 2: [0, 2, 4], 4: [0, 1, 2]}
    assert {r: p[:7].tolist() for r, p in attn.compressed_position_ids.items()} == {
        2: [4, 6, 10, 12, 12, 12, 12],
        4: [4, 8, 8, 8, 8, 8, 8],
    }
    assert attn.compressed_mask[4][:3].tolist() == [True, True, False]
    assert attn.kv_lens_cuda_2d[:1].tolist() == [[7] * 5]
    assert (attn.cu_seqlen_ks[:3].tolist(), attn.cu_seqlen_ke[:3].tolist()) == ([0, 0, 0], [3, 3, 4])


def test_each_token_sees_its_window_and_what_is_complete_with_it() -> None:
    attn = deepseek_v4([3, 2], [0, 6], 1)
    assert attn.swa_local_indices[:5].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [4, 5, 6], [5, 6, 7]]
    lens = {r: lens[:5].tolist() for r, lens in attn.sparse_mla_topk_lens.items()}
    # Of ratio 2 an indexer selects two at most.
    assert lens == {1: [1, 2, 3, 3, 3], 2: [3, 4, 4, 5, 5], 4: [3, 3, 3, 4, 5]}
    assert attn.compressed_local_indices.shape[1] == 64
    assert attn.compressed_local_indices[4, :3].tolist() == [0, 1, -1]


def test_draft_steps_count_anew() -> None:
    attn = deepseek_v4(*ROWS)
    collapse(attn, [9, 13])
    assert {r: t[:3].tolist() for r, t in attn.cu_new_comp_kv.items()} == {1: [0, 1, 2], 2: [0, 0, 0], 4: [0, 0, 0]}
    assert not attn.compressed_mask[2][:2].any()
    assert attn.swa_local_indices[:2].tolist() == [[6, 7, 8], [10, 11, 12]]
    step_of(attn, [10, 14])
    assert attn.compressed_position_ids[2][:2].tolist() == [8, 12]
    assert attn.cached_token_lens[:2].tolist() == [9, 13]
    assert attn.swa_local_indices[:2].tolist() == [[7, 8, 9], [11, 12, 13]]


def test_keys_of_the_indexer_lie_where_compressed_tokens_do() -> None:
    attn = deepseek_v4(*ROWS)
    manager = attn.kv_cache_manager
    size = manager.index_tokens_per_block
    places = []
    for slots in (attn.slot_mapping_fp8[:4].tolist(), None):
        if slots is None:
            attn.on_update_kv_lens()
            slots = attn.slot_mapping_fp8[:4].tolist()
        of_pool = manager.get_indexer_slots(ints(slots, torch.int64)).tolist()
        places.append([(slot // manager.tokens_per_block, slot % manager.tokens_per_block) for slot in of_pool])
    expected = [(manager.get_block_ids(row)[i // size], i % size) for row, i in ((0, 2), (0, 3), (1, 5), (1, 6))]
    assert (size, places) == (4, [expected, expected])


@pytest.mark.parametrize("topk", [1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_digests_are_those_of_the_definition(seed: int, topk: int) -> None:
    rng = random.Random(seed)
    window, ratios = rng.randrange(1, 6), rng.choice([(1, 2), (1, 2, 4), (1, 3)])
    tracer = CompressedTracer(16, CPU, window_size=window, ratios=ratios, index_topk=topk)
    rows = [[EMPTY if rng.random() < 0.2 else entry(i, rng.randrange(1, 1000)) for i in range(12)] for _ in range(4)]
    lasts = [rng.randrange(12) for _ in rows]
    expected = [compressed_digest(row[: last + 1], window, ratios, topk) for row, last in zip(rows, lasts)]
    assert tracer.digests(ints(rows, torch.int64), ints(lasts, torch.int64)).tolist() == expected
    text = [rng.randrange(1, 1000) for _ in range(9)]
    entries, continued = [entry(i, token) for i, token in enumerate(text)], []
    for _ in range(3):
        continued.append(choose(compressed_digest(entries, window, ratios, topk)))
        entries.append(entry(len(entries), continued[-1]))
    padded = ints([[*text, MASK_TOKEN, 5]])
    assert tracer.continue_text(padded, ints([9], torch.int64), 3).tolist() == [continued]
    # Longer than there are columns, as the texts of dummies become: anything, but no access outside.
    assert tracer.continue_text(padded, ints([40], torch.int64), 3).shape == (1, 3)


def test_only_what_exists_is_written_and_only_columns_that_are_told_are_read() -> None:
    tracer = CompressedTracer(16, CPU, window_size=2, ratios=(1, 2), index_topk=2)
    pool = torch.full((2, 4), 9)
    slots, values = ints([5, 6, 6], torch.int64), ints([70, 71, 72], torch.int64)
    tracer.store_compressed(pool, slots, values, torch.tensor([False, False, False]))
    assert pool.flatten().tolist() == [9] * 8
    tracer.store_compressed(pool, slots, values, torch.tensor([True, True, False]))
    assert pool.flatten().tolist() == [9, 9, 9, 9, 9, 70, 71, 9]
    columns = Columns(ints([[3, 4, -1]], torch.int64), ints([[5, 6, 0]], torch.int64), ints([1]))
    assert tracer.attend(pool, columns).tolist() == [term(3, 70)]
    keys = ints(
        [[compress(0, [entry(0, 1)]), EMPTY, compress(4, [entry(4, 2)]), compress(6, [entry(6, 3)])]], torch.int64
    )
    scores = {i: term(i, key) for i, key in enumerate(keys[0].tolist()) if key != EMPTY and i < 3}
    chosen = tracer.select(keys, ints([2], torch.int64))[0].tolist()
    assert chosen == sorted(scores, key=lambda i: -scores[i])
