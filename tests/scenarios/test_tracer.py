"""The tracer model's definition: numbers that every engine and the oracle share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios import tracer

tokens = st.integers(0, tracer.VOCAB_SIZE - 1)
positions = st.integers(-tracer.POSITION_OFFSET, 8192)
digests = st.integers(0, tracer.PRIME - 1)


@given(positions, tokens)
def test_an_entry_tells_position_and_token_and_is_never_empty(position: int, token: int) -> None:
    value = tracer.entry(position, token)
    assert value > tracer.EMPTY
    assert tracer.entry_fields(value) == (position, token)


def test_an_empty_slot_holds_no_entry() -> None:
    assert tracer.entry_fields(tracer.EMPTY) is None


@given(digests)
def test_the_target_never_chooses_a_token_with_a_meaning(digest: int) -> None:
    token = tracer.choose(digest)
    assert token not in (tracer.PAD_TOKEN, tracer.MASK_TOKEN)
    assert 0 < token < tracer.VOCAB_SIZE


@given(st.integers(1, tracer.VOCAB_SIZE - 2))
def test_disagreement_is_another_token_that_the_target_could_choose(token: int) -> None:
    other = tracer.disagree(token)
    assert other != token
    assert 1 <= other <= tracer.VOCAB_SIZE - 2


def test_values_are_pinned() -> None:
    """Stored findings rely on them."""
    assert tracer.term(3, tracer.entry(3, 17)) == 239_909_802
    assert [tracer.prompt_token(seed=5, request=2, position=p) for p in range(4)] == [951, 156, 769, 915]
    assert tracer.choose(123_456_789) == 590


@given(st.integers(0, 4096), st.integers(0, 2**31))
def test_products_fit_64_bits_so_that_devices_agree(index: int, value: int) -> None:
    x = value % tracer.PRIME * tracer.ENTRY_FACTOR + index * tracer.INDEX_FACTOR + tracer.TERM_SHIFT
    assert x < 2**63
    assert 0 <= tracer.term(index, value) < tracer.PRIME
    assert (tracer.PRIME - 1) ** 2 < 2**63


@pytest.mark.parametrize("accept", [1, 2, 4])
@pytest.mark.parametrize("index_topk", [0, 1, 2, 99])
def test_dummy_drafts_are_accepted_up_to_the_wish(accept: int, index_topk: int) -> None:
    past, draft_len = 3, 3
    drafts = tracer.dummy_drafts(past, draft_len, accept, index_topk)
    # A sparse target attends to its highest scores, and to no empty slot; a dense one to every slot.
    terms = [] if index_topk else [tracer.term(s, tracer.EMPTY) for s in range(past)]
    agreeing, token = 0, tracer.DUMMY_TOKEN
    for depth, draft in enumerate(drafts):
        terms.append(tracer.term(past + depth, tracer.entry(past + depth, token)))
        token = tracer.choose(sum(sorted(terms, reverse=True)[: index_topk or len(terms)]))
        if draft != token:
            break
        agreeing += 1
    assert len(drafts) == draft_len
    assert 1 + agreeing == accept
