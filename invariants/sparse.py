"""Sparse attention: maps from tokens to rows and slots, which must follow every change of layout and lengths.

They are built for the target's layout; a draft loop that goes on with one token per row makes each of them stale.
All forwards are held to the same rule, by the lengths that they find: ``prepared``, ``entered`` and each draft call.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from invariants.case import StepCase
from invariants.check import Check
from invariants.pools import read_by
from invariants.registry import REFERENCE, invariant

_LENS: Final = ("_seq_lens", "kv_lens_cuda")
_OF_FORWARD: Final = (
    "req_idx_per_token",
    "slot_owners",
    "scale_owners",
    "gen_kv_indptr",
    "gen_cached_token_indptr",
    "kv_lens_cuda_2d",
    "max_gen_seq_len",
)
_TABLES: Final = ("block_table", "indexer_k_cache_block_offsets")
_INDEXED: Final = (("target_indexer_kv", "target_kv"), ("draft_indexer_kv", "draft_kv"))


@invariant(
    "req-idx-matches-layout", reads=("req_idx_per_token", "_seq_lens"), museum=("TRT-12", "TRT-13"), predicates=("P7",)
)
def req_idx_matches_layout(step: StepCase, check: Check) -> None:
    """Every forward finds each token mapped to its own row: ``req_idx_per_token`` repeats row r ``_seq_lens[r]`` times.

    PR #16925: the map of the target's layout was used in draft calls. A batch of one and K = 1 do not show it.
    """
    for moment in step.forwards:
        seen = moment.seen
        if "req_idx_per_token" in seen and "_seq_lens" in seen:
            lens = seen["_seq_lens"]
            expected = [row for row, query in enumerate(lens) for _ in range(query)]
            check.equal(moment, "req_idx_per_token", expected, seen["req_idx_per_token"], f"_seq_lens is {lens}")


@invariant(
    "slots-in-own-pages",
    reads=("slot_owners", "scale_owners", "slot_mapping_fp8", *_LENS),
    museum=("TRT-12", "TRT-13", "TRT-63", "VLL-07"),
    predicates=("P7",),
)
def slots_in_own_pages(step: StepCase, check: Check) -> None:
    """In every forward each token's key goes to its own row and KV index, ``kv - query + j``, and no two share a slot.

    So does the scale of the key, which is no use anywhere else.
    A block ordinal that is clamped into the table (PR #12657) still points to somebody's page.
    """
    for moment in step.forwards:
        seen = moment.seen
        # Keys of compressed tokens are fewer; where they go is told in ``compressed``.
        if all(field in seen for field in _LENS) and not step.config.compress_ratios:
            rows = zip(seen["_seq_lens"], seen["kv_lens_cuda"], strict=False)
            expected = [[row, i] for row, (query, kv) in enumerate(rows) for i in range(kv - query, kv)]
            for field in ("slot_owners", "scale_owners"):
                if field in seen:
                    check.equal(moment, field, expected, seen[field], "so say _seq_lens and kv_lens_cuda")
        if "slot_mapping_fp8" in seen:
            slots = seen["slot_mapping_fp8"]
            twice = sorted({slot for slot in slots if slots.count(slot) > 1}) if len(set(slots)) < len(slots) else []
            check.that(not twice, moment, "slot_mapping_fp8", [], twice, f"slots {twice} are written twice")


@invariant(
    "gen-indptr-consistent",
    reads=("gen_kv_indptr", "gen_cached_token_indptr", "num_contexts", *_LENS),
    museum=("TRT-17", "TRT-16"),
    predicates=("P7",),
)
def gen_indptr_consistent(step: StepCase, check: Check) -> None:
    """In every forward the generations' prefix sums are those of ``kv_lens_cuda`` and of what was cached before it."""
    for moment in step.forwards:
        seen = moment.seen
        if "num_contexts" not in seen or not all(field in seen for field in _LENS):
            continue
        first = seen["num_contexts"]
        kv, query = seen["kv_lens_cuda"][first:], seen["_seq_lens"][first:]
        cached = [total - fed for total, fed in zip(kv, query, strict=False)]
        for field, lens in (("gen_kv_indptr", kv), ("gen_cached_token_indptr", cached)):
            if field in seen:
                expected = list(accumulate(lens, initial=0))
                check.equal(moment, field, expected, seen[field], f"lengths of the generations are {lens}")


@invariant(
    "gen-kv-lens-in-every-column",
    reads=("kv_lens_cuda_2d", "kv_lens_cuda", "num_contexts"),
    museum=("TRT-16", "TRT-19"),
    predicates=("P7",),
)
def gen_kv_lens_in_every_column(step: StepCase, check: Check) -> None:
    """In every forward ``kv_lens_cuda_2d`` holds each generation's KV length in all of its ``1 + Kmax`` columns.

    That is counted in keys of the indexer, of which a compressed token has one.
    """
    ratio = step.config.compress_ratios[1] if step.config.compress_ratios else 1
    for moment in step.forwards:
        seen = moment.seen
        if "kv_lens_cuda_2d" in seen and "kv_lens_cuda" in seen and "num_contexts" in seen:
            kv, columns = seen["kv_lens_cuda"][seen["num_contexts"] :], 1 + step.config.max_draft_len
            expected = [[length // ratio] * columns for length in kv]
            check.equal(moment, "kv_lens_cuda_2d", expected, seen["kv_lens_cuda_2d"], f"kv_lens_cuda is {kv}")


@invariant(
    "sparse-tables-name-owned-pages",
    reads=(*_TABLES, "kv_cache_block_offsets", "draft_kv_cache_block_offsets", "kv_lens_cuda"),
    museum=("TRT-63", "TRT-62", "VLL-07", "VLL-08"),
    predicates=("P7",),
)
def sparse_tables_name_owned_pages(step: StepCase, check: Check) -> None:
    """The tables of indexer and selection name each row's own pages, in order, for its whole length.

    In a draft call over a cache of its own they are pages of the drafter's pool, of the size that it has there. After
    the forward they are the target's again, and after a failure.
    """
    prepared = step.prepared
    if prepared is None or "kv_lens_cuda" not in prepared.seen:
        return
    for moment in step.moments:
        pool = read_by(step.config, moment)
        source = pool.field("kv_cache_block_offsets")
        if source not in prepared.seen:
            continue
        rows = zip(prepared.seen[source], prepared.seen["kv_lens_cuda"], strict=False)
        expected = [pages[: pool.pages(kv)] for pages, kv in rows]
        for field in _TABLES:
            if field in moment.seen:
                check.equal(moment, field, expected, moment.seen[field], f"so says {source}")


@invariant(
    "indexer-keys-equal-cache",
    reads=tuple(f for pair in _INDEXED for f in pair),
    museum=("TRT-63",),
    predicates=("P7",),
)
def indexer_keys_equal_cache(step: StepCase, check: Check) -> None:
    """After each step the indexer's cache holds the same tokens as the main one, target's and drafter's alike."""
    moment = step.updated
    if moment is None or not step.active or step.config.compress_ratios:
        return
    for keys, content in _INDEXED:
        if keys in moment.seen and content in moment.seen:
            check.agree(moment, keys, moment.seen[content], moment.seen[keys], content)


@invariant(
    "sparse-maps-equal-reference",
    reads=_OF_FORWARD,
    museum=("TRT-12", "TRT-13", "TRT-16", "TRT-17"),
    kind=REFERENCE,
    predicates=("P7",),
)
def sparse_maps_equal_reference(step: StepCase, check: Check) -> None:
    """In every forward the sparse backend's maps, slots, prefix sums and lengths are the reference's."""
    for moment in step.forwards:
        check.said(moment, _OF_FORWARD)
