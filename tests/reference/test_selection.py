"""What a step says of rows that need no indexer, of rows of several tokens, of contexts' keys and of chains."""

from __future__ import annotations

import pytest

from reference.flash_infer import FlashInferRow, shared_kv_lens
from reference.indexer_prefill import Chunk, prefill_chunks
from scenarios import Context, Generation, Phase, Request, Scenario, Step, check
from tests.reference.cases import EAGLE3, LINEAR, PARD, at, configuration, last_step, serve

FLAGS = ("skip_indexer_for_ctx_reqs", "skip_indexer_for_gen_reqs")


@pytest.mark.parametrize(
    ("index_topk", "flags"), [(15, (True, False)), (16, (True, True)), (7, (True, False)), (6, (False, False))]
)
def test_a_class_is_skipped_while_its_longest_row_stays_below_the_selection(
    index_topk: int, flags: tuple[bool, bool]
) -> None:
    # The context has 5 tokens, the generations 14 and 10, and the loop appends one.
    step = serve(EAGLE3, past=(11, 7), acc=(1, 1), draft_len=2, index_topk=index_topk)
    prepared, call = at(step, "prepared"), at(step, "draft[1]")
    assert tuple(prepared[name] for name in FLAGS) == flags
    assert (call[FLAGS[0]], call[FLAGS[1]]) == (False, all(flags))
    skipped = [list(range(i + 1)) for i in range(5)] if flags[0] else [None] * 5
    assert prepared["topk_indices_buffer"][:5] == skipped


@pytest.mark.parametrize("phase", [Phase.CAPTURE, Phase.WARMUP])
def test_a_graph_skips_nothing(phase: Phase) -> None:
    dummies = Step(phase=phase, draft_len=2, generations=(Generation(request=None, past=3),))
    step = last_step(configuration(EAGLE3, 2, index_topk=64), (), dummies)
    short = phase is Phase.WARMUP
    for substep in step.named("prepared", "entered", "draft"):
        assert substep[FLAGS[1]] is short
        assert (None in substep["topk_indices_buffer"]) is not short


def test_rows_of_several_tokens_have_the_length_of_their_generation() -> None:
    step = serve(EAGLE3, draft_len=2, acc=(1, 1), index_topk=4)
    assert at(step, "prepared")["kv_lens_expanded_cuda"] == [13] * 3 + [23] * 3
    assert at(step, "draft[1]")["kv_lens_expanded_cuda"] == [6] * 3 + [12] * 3 + [22] * 3
    assert "kv_lens_expanded_cuda" not in at(serve(EAGLE3, draft_len=1, acc=(1, 1), index_topk=4), "prepared")


def test_keys_of_contexts_include_those_of_their_earlier_chunks() -> None:
    config = configuration(EAGLE3, 2, index_topk=4)
    requests = (Request(id=0, prompt_len=5), Request(id=1, prompt_len=2))
    first = Step(draft_len=2, contexts=(Context(request=0, chunk=3),))
    second = Step(draft_len=2, contexts=(Context(request=0, chunk=2), Context(request=1, chunk=2)))
    check(Scenario(config=config, requests=requests, steps=(first, second)))
    prepared = at(last_step(config, requests, first, second), "prepared")
    assert (prepared["cu_seqlen_ks"], prepared["cu_seqlen_ke"]) == ([0, 0, 5, 5], [4, 5, 6, 7])
    assert (prepared["ctx_kv_indptr"], prepared["ctx_cached_token_indptr"]) == ([0, 5, 7], [0, 3, 3])
    assert prepared["fullkv_owners"] == [*([0, i] for i in range(5)), [1, 0], [1, 1]]


@pytest.mark.parametrize("worker", [*LINEAR, PARD])
def test_chains_are_told_to_the_target(worker: str) -> None:
    step = serve(worker, acc=(1, 1), draft_len=2)
    width = at(step, "prepared")["runtime_tokens_per_gen_step"]
    for substep in step.named("prepared", "entered", "restored"):
        assert substep["spec_decoding_packed_mask"] == [[list(range(i + 1)) for i in range(width)]] * 2
        assert substep["spec_decoding_position_offsets"] == [list(range(width))] * 2
        assert substep["spec_decoding_generation_lengths"] == [width] * 2
    assert all("spec_decoding_packed_mask" not in call for call in step.named("draft"))


def test_without_drafts_there_are_no_chains() -> None:
    step = serve(EAGLE3, acc=(1, 1), draft_len=0, max_draft_len=2)
    assert "spec_decoding_packed_mask" not in at(step, "prepared")


def test_contexts_share_a_piece_that_they_fill() -> None:
    (piece,) = prefill_chunks([Chunk(0, 2), Chunk(1, 2)], 4)
    assert (piece.tokens, piece.keys) == ((0, 4), (0, 5))
    assert piece.windows == [(0, 1), (0, 2), (2, 4), (2, 5)]


def test_a_context_of_a_shared_view_has_its_chunk_whatever_is_accepted() -> None:
    assert shared_kv_lens([FlashInferRow(2, 5), FlashInferRow(6, 4)], [1, 3], 1) == [7, 9]
