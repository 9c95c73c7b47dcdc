"""Functions of the oracle that no worked example covers, and what must hold of them for any input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.buffer_pool import Asked, blocks
from reference.context_mla import COPY, MERGE, SKIP, chunk_plan
from reference.indexer_prefill import Chunk, prefill_chunks, windows
from reference.indexer_schedule import split

CONTEXTS = st.lists(st.builds(Chunk, st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("asked", "given_blocks"),
    [
        # Graphs, the largest first, share its block; a larger one that comes later gets another.
        ([(8, True), (4, True), (2, True), (16, True), (4, True)], [0, 0, 0, 3, 0]),
        # Others never share, and their last block is taken over by a graph, or dropped.
        ([(8, False), (4, False), (4, True), (4, False)], [0, 1, 1, 3]),
        ([(8, False), (4, False), (8, True)], [0, 1, 2]),
        # A smaller block that nobody has reserved does not stand in for one that a graph reads already.
        ([(8, True), (4, False), (4, True), (2, True)], [0, 1, 0, 0]),
        # Of two that graphs read, the smaller one.
        ([(4, True), (8, True), (4, True), (6, True)], [0, 1, 0, 1]),
    ],
)
def test_which_buffers_share_storage(asked: list[tuple[int, bool]], given_blocks: list[int]) -> None:
    assert blocks([Asked(*one) for one in asked]) == given_blocks


@given(CONTEXTS, st.integers(1, 12), st.integers(1, 4))
def test_pieces_of_contexts_hold_every_token_once_with_its_window(
    contexts: list[Chunk], longest: int, ratio: int
) -> None:
    pieces = prefill_chunks(contexts, longest, ratio)
    assert [token for piece in pieces for token in range(*piece.tokens)] == list(range(sum(c.query for c in contexts)))
    assert all(piece.tokens[1] - piece.tokens[0] <= longest for piece in pieces)
    found = [(piece.keys[0] + ks, piece.keys[0] + ke) for piece in pieces for ks, ke in piece.windows]
    assert found == windows(contexts, ratio)
    assert all(ke <= piece.keys[1] - piece.keys[0] for piece in pieces for _, ke in piece.windows)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 9))
def test_loops_read_each_cached_token_once(cached: list[int], buffer: int) -> None:
    plan = chunk_plan(cached, buffer)
    assert all(sum(row) == buffer for row in plan.lengths[:-1])
    assert [sum(column) for column in zip(*plan.lengths, strict=True)] == (cached if any(cached) else [])
    for i, length in enumerate(cached):
        merges = [row[i] for row in plan.merges]
        assert merges.count(COPY) == 1
        assert merges[-1] == (MERGE if length else COPY)
        assert [merge != SKIP for merge in merges[:-1]] == [row[i] > 0 for row in plan.lengths]
        # What a request had before a loop is what the loops before it read.
        read = 0
        for lengths, offsets in zip(plan.lengths, plan.offsets[1:], strict=True):
            read += lengths[i]
            assert offsets[i] == (read if lengths[i] else 0)


@given(st.integers(1, 12), st.integers(1, 64), st.integers(1, 9000))
def test_a_split_has_every_token(next_n: int, generations: int, longest: int) -> None:
    factor, atom = split(next_n, (1, 2, 3), generations=generations, longest=longest, num_sms=148)
    assert factor * atom == next_n
    # With a multiprocessor for each, as many rows as there are tokens.
    assert split(next_n, (1, 2, 3), generations=1, longest=256, num_sms=148) == (next_n, 1)
