"""Falsified traces of further attention backends: compressed tokens, pages as running totals, sequences of one page."""

from __future__ import annotations

from typing import Any

from scenarios import Context, Request, Scenario, Step, check
from tests.invariants.cases import EAGLE, MTP_EAGLE, PARD, SA, failing, on_backend, separate, served, started_up
from tests.invariants.mutation import at, bump, put, set_to, swap

COMPRESSED, COMPRESSED_APART = (
    on_backend(served(EAGLE), "DEEPSEEK_V4"),
    separate(on_backend(served(PARD), "DEEPSEEK_V4")),
)
COMPRESSED_STARTED = on_backend(started_up(EAGLE), "DEEPSEEK_V4")
SHARED, VIEWED = on_backend(served(MTP_EAGLE), "FLASHINFER"), separate(on_backend(served(EAGLE), "FLASHINFER"))
VIEWED_STARTED = separate(on_backend(started_up(EAGLE), "FLASHINFER"))
MOVING = separate(on_backend(served(EAGLE), "FLASHINFER"), kv_cache_manager="V2", host_offload=True)
ALONE = on_backend(served(SA), "VANILLA")
# The first chunk of request 1 shares a batch with the last one of request 0, which a prompt in one piece does not.
JOINED = on_backend(
    check(
        Scenario(
            config=served(EAGLE).config,
            requests=(Request(id=0, prompt_len=2), Request(id=1, prompt_len=7)),
            steps=(
                Step(draft_len=0, contexts=(Context(request=0, chunk=1),)),
                Step(draft_len=0, contexts=(Context(request=0, chunk=1), Context(request=1, chunk=6))),
                Step(draft_len=0, contexts=(Context(request=1, chunk=1),)),
            ),
        )
    ),
    "DEEPSEEK_V4",
)
SCENARIOS = [
    *(COMPRESSED, COMPRESSED_APART, COMPRESSED_STARTED, SHARED, VIEWED_STARTED, MOVING, VIEWED, ALONE),
    *(separate(on_backend(failing(EAGLE), name)) for name in ("DEEPSEEK_V4", "FLASHINFER")),
    on_backend(failing(SA), "VANILLA"),
    JOINED,
]


def of(ratio: int, change: Any) -> Any:
    """A change of what belongs to one ratio."""

    def of_ratio(values: Any) -> Any:
        return {**values, ratio: change(values[ratio])}

    return of_ratio


_COMPRESSED = [
    # Counts of the target's layout in a draft call: generation of 4 tokens, then of 1.
    at("compressed-counts-follow-lengths", COMPRESSED, 1, "draft[1]", "new_comp_kv_lens", of(2, bump(1))),
    at("compressed-counts-follow-lengths", COMPRESSED, 1, "draft[1]", "cu_seq_lens", bump(2, by=3)),
    at("compressed-counts-follow-lengths", COMPRESSED, 2, "draft[2]", "cached_token_lens", bump(0, by=-1)),
    at("compressed-counts-follow-lengths", COMPRESSED_STARTED, 1, "entered", "past_kv_lens", of(4, bump(0)), 2),
    at("compressed-counts-follow-lengths", COMPRESSED, 2, "prepared", "compressed_kv_lens", of(4, bump(1))),
    at("compressed-counts-follow-lengths", COMPRESSED, 2, "prepared", "cu_new_comp_kv", of(2, bump(1))),
    at("compressed-counts-follow-lengths", COMPRESSED, 2, "entered", "compressed_position_ids", of(2, bump(0, by=2))),
    at("compressed-counts-follow-lengths", COMPRESSED, 2, "entered", "compressed_mask", of(2, put(0, False))),
    at("tokens-see-up-to-themselves", COMPRESSED, 2, "draft[1]", "swa_local_indices", swap),
    at("tokens-see-up-to-themselves", COMPRESSED, 2, "draft[1]", "swa_local_indices", lambda rows: [*rows, rows[-1]]),
    at("tokens-see-up-to-themselves", COMPRESSED, 0, "prepared", "swa_local_indices", lambda rows: [
        [0, 1, 2], *rows[1:]
    ]),
    at("tokens-see-up-to-themselves", COMPRESSED_STARTED, 3, "entered", "sparse_mla_topk_lens", of(2, bump(0))),
    at("tokens-see-up-to-themselves", COMPRESSED, 2, "draft[2]", "compressed_local_indices", put(0, [-1] * 32)),
    at("compressed-keys-follow-lengths", COMPRESSED, 2, "entered", "slot_owners", put(0, [-1, -1])),
    at("compressed-keys-follow-lengths", COMPRESSED, 2, "prepared", "scale_owners", swap),
    at("compressed-keys-follow-lengths", COMPRESSED, 1, "prepared", "cu_seqlen_ke", bump(0)),
    at("compressed-keys-follow-lengths", COMPRESSED, 1, "prepared", "fullkv_owners", put(0, [1, 0])),
    at("compressed-tables-name-owned-pages", COMPRESSED, 2, "entered", "compress_block_tables", of(4, swap)),
    at("compressed-tables-name-owned-pages", COMPRESSED_APART, 2, "draft[0]", "sliding_block_tables", swap),
    at("compressed-tables-name-owned-pages", COMPRESSED_APART, 2, "restored", "sliding_block_tables", swap),
    at("compressed-cache-is-made-of-tokens", COMPRESSED, 2, "updated", "target_compressed_kv", of(
        2, put(0, [1, 2])
    )),
    at("compressed-cache-is-made-of-tokens", COMPRESSED, 2, "updated", "target_indexer_kv", put(1, [0])),
    at("kv-content-equals-reference", COMPRESSED, 3, "updated", "target_compressed_kv", of(4, put(1, [0]))),
    at("compression-equals-reference", COMPRESSED, 2, "draft[1]", "compressed_local_indices", swap),
    at("compression-equals-reference", COMPRESSED, 2, "prepared", "sparse_mla_topk_lens", of(1, bump(0))),
    at("output-lossless", COMPRESSED, 6, "updated", "emitted", lambda emitted: {**emitted, 1: [*emitted[1][:-1], 5]}),
]  # fmt: skip

_PAGED = [
    # 0 tokens on the last page where it is full; lengths of the target in a call of its drafter; rows of its layout.
    set_to("page-arrays-match-layout", SHARED, 0, "prepared", "_paged_kv_last_page_len", [1, 0]),
    at("page-arrays-match-layout", SHARED, 2, "draft[1]", "_cached_token_lens", bump(0, by=2)),
    at("page-arrays-match-layout", VIEWED, 2, "draft[1]", "_paged_kv_last_page_len", bump(0)),
    at("page-arrays-match-layout", VIEWED, 2, "draft[2]", "_positions", bump(1, by=-1)),
    at("page-arrays-match-layout", VIEWED, 1, "draft[1]", "_batch_indices", put(1, 0)),
    at("page-arrays-match-layout", VIEWED_STARTED, 1, "entered", "_qo_indptr", bump(1), 2),
    at("page-arrays-match-layout", VIEWED_STARTED, 1, "draft[0]", "_qo_indptr", put(1, 1), 1),
    at("page-arrays-match-layout", VIEWED, 2, "draft[1]", "kv_lens_cuda", bump(0)),
    at("page-totals-add-up", VIEWED, 1, "prepared", "_paged_kv_indptr_prefill", bump(1)),
    at("page-totals-add-up", VIEWED, 2, "draft[1]", "_paged_kv_indptr_decode", bump(2)),
    set_to("kernels-are-planned-for-the-step", SHARED, 2, "prepared", "planned_num_blocks", []),
    at("kernels-are-planned-for-the-step", VIEWED, 1, "entered", "planned_num_blocks", bump(0)),
    at("page-totals-add-up", SHARED, 1, "entered", "_paged_kv_indptr", bump(2)),
    at("page-totals-add-up", VIEWED, 2, "draft[2]", "num_blocks", put(0, 1)),
    at("page-totals-add-up", SHARED, 2, "entered", "num_blocks", bump(1)),
    at("page-totals-add-up", SHARED, 2, "entered", "_paged_kv_indices", lambda pages: [pages[0][:-1], *pages[1:]]),
    at("page-arrays-name-owned-pages", VIEWED, 2, "draft[1]", "_paged_kv_indices", swap),
    at("page-arrays-name-owned-pages", MOVING, 2, "entered", "_paged_kv_indices", swap),
    at("page-arrays-name-owned-pages", SHARED, 2, "prepared", "_paged_kv_indices", lambda pages: [pages[0], pages[0]]),
    at("page-arrays-equal-reference", VIEWED, 2, "draft[1]", "_cached_token_lens", bump(0)),
    at("page-arrays-equal-reference", SHARED, 2, "prepared", "num_blocks", bump(0)),
    at("page-arrays-equal-reference", VIEWED, 2, "restored", "num_blocks", bump(0)),
    at("one-page-per-sequence", ALONE, 2, "entered", "cache_indices", swap),
    at("one-page-per-sequence", ALONE, 1, "restored", "cache_indices", put(0, [0, 1])),
    at("one-page-per-sequence", ALONE, 1, "restored", "num_cached_tokens_per_seq", bump(0)),
    # One page for each sequence: rows of the batch before, and two.
    at("tables-name-owned-pages", ALONE, 2, "prepared", "block_ids_per_seq", swap),
    at("tables-name-owned-pages", ALONE, 1, "prepared", "block_ids_per_seq", put(0, [0, 1])),
    at("tables-name-owned-pages", VIEWED, 2, "prepared", "draft_block_ids_per_seq", swap),
    # A view of the target's cache that counts the rejected tokens, and one that is not led on.
    at("kv-lens-balanced", SHARED, 2, "draft[0]", "_draft_kv_runtime_lens", bump(0, by=2)),
    at("kv-lens-balanced", VIEWED, 2, "draft[2]", "kv_lens_cuda", bump(1, by=-1)),
    at("draft-position-is-kv-minus-one", SHARED, 2, "draft[1]", "position_ids", bump(0)),
    at("restored-layout", VIEWED, 2, "restored", "_seq_lens", lambda lens: [1] * len(lens)),
]  # fmt: skip

BACKEND_MUTATIONS = [*_COMPRESSED, *_PAGED]
