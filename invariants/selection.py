"""Sparse attention: what rows select when their indexer is skipped, and what indexers of several tokens look through.

A class of rows is skipped when none of them can have more tokens than are selected. Upstream decides so for contexts
and for generations before a step; a draft loop then makes generations of the contexts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from invariants.case import Moment, StepCase
from invariants.check import Check
from invariants.pools import read_by
from invariants.registry import REFERENCE, invariant

_FLAGS: Final = ("skip_indexer_for_ctx_reqs", "skip_indexer_for_gen_reqs")
_LENS: Final = ("_seq_lens", "kv_lens_cuda")
_LAYOUT: Final = (*_FLAGS, *_LENS, "num_contexts")
_DENSE: Final = "topk_indices_buffer"
_EXPANDED: Final = ("kv_lens_expanded_cuda", "block_table_expanded")
_PREFILL: Final = ("cu_seqlen_ks", "cu_seqlen_ke", "ctx_kv_indptr", "ctx_cached_token_indptr", "fullkv_owners")


def _skipped(moment: Moment) -> Iterator[tuple[int, int, bool]]:
    """Query, KV length and whether the indexer is skipped, per row of a forward."""
    seen = moment.seen
    if all(field in seen for field in _LAYOUT):
        for row, (query, kv) in enumerate(zip(seen["_seq_lens"], seen["kv_lens_cuda"], strict=False)):
            yield query, kv, seen[_FLAGS[row >= seen["num_contexts"]]]


@invariant("skipped-rows-fit-the-selection", reads=_LAYOUT, museum=("TRT-99",), predicates=("P7",))
def skipped_rows_fit_the_selection(step: StepCase, check: Check) -> None:
    """No forward skips the indexer for a row that has more tokens than are selected.

    Upstream's flag of the generations outlives the contexts: a former context that is long selects its beginning.
    """
    topk = step.config.index_topk
    for moment in step.forwards:
        for row, (_, kv, skipped) in enumerate(_skipped(moment)):
            if skipped:
                message = f"row {row} has {kv} tokens and selects {topk} of them without being asked"
                check.that(kv <= topk, moment, "kv_lens_cuda", f"at most {topk}", kv, message)


@invariant("skipped-rows-see-all-of-theirs", reads=(_DENSE, *_LAYOUT), museum=("TRT-99", "TRT-16"), predicates=("P7",))
def skipped_rows_see_all_of_theirs(step: StepCase, check: Check) -> None:
    """In every forward a token whose indexer is skipped selects everything up to its own place, and no other does."""
    for moment in step.forwards:
        rows = list(_skipped(moment))
        if rows and _DENSE in moment.seen:
            expected = [
                list(range(place + 1)) if skipped else None
                for query, kv, skipped in rows
                for place in range(kv - query, kv)
            ]
            check.equal(moment, _DENSE, expected, moment.seen[_DENSE], "so say lengths and flags")


@invariant(
    "expanded-rows-follow-their-generation",
    reads=(*_EXPANDED, "kv_cache_block_offsets", "draft_kv_cache_block_offsets", "kv_lens_cuda", "num_contexts"),
    museum=("TRT-16", "TRT-19", "TRT-63"),
    predicates=("P7",),
)
def expanded_rows_follow_their_generation(step: StepCase, check: Check) -> None:
    """Where each token of a generation is a row of its own, every such row has its generation's length and pages.

    A draft call over a cache of its own reads pages of that.
    """
    tokens = 1 + step.config.max_draft_len
    lens, pages = _EXPANDED
    prepared = step.prepared.seen if step.prepared is not None else {}
    for moment in step.forwards:
        seen = moment.seen
        if "kv_lens_cuda" not in seen or "num_contexts" not in seen:
            continue
        first, kv_lens = seen["num_contexts"], seen["kv_lens_cuda"]
        if lens in seen:
            expected = [kv for kv in kv_lens[first:] for _ in range(tokens)]
            check.equal(moment, lens, expected, seen[lens], f"kv_lens_cuda is {kv_lens}")
        pool = read_by(step.config, moment)
        source = pool.field("kv_cache_block_offsets")
        if pages in seen and source in prepared and "kv_lens_cuda" in prepared:
            rows = zip(prepared[source], prepared["kv_lens_cuda"], strict=False)
            used = [row[: pool.pages(kv)] for row, kv in rows]
            expected_pages = [row for row in used[first:] for _ in range(tokens)]
            check.equal(moment, pages, expected_pages, seen[pages], f"so says {source}")


@invariant("context-windows-end-at-their-token", reads=_PREFILL, museum=("TRT-17",), predicates=("P7",))
def context_windows_end_at_their_token(step: StepCase, check: Check) -> None:
    """The keys of contexts lie one request after the other, cached ones included; a token sees those up to its own.

    A draft call looks for the same keys in the cache that it reads. For keys of compressed tokens see ``compressed``.
    """
    if step.config.compress_ratios:
        return
    rows = step.rows[: step.num_contexts]
    firsts = list(accumulate((row.past + row.query for row in rows), initial=0))
    windows = [
        (first, first + row.past + i + 1) for row, first in zip(rows, firsts, strict=False) for i in range(row.query)
    ]
    expected = {
        "cu_seqlen_ks": [start for start, _ in windows],
        "cu_seqlen_ke": [end for _, end in windows],
        "ctx_kv_indptr": firsts,
        "ctx_cached_token_indptr": list(accumulate((row.past for row in rows), initial=0)),
        "fullkv_owners": [[row.index, place] for row in rows for place in range(row.past + row.query)],
    }
    for field, value in expected.items():
        for seen_at in step.forwards:
            if field in seen_at.seen:
                check.equal(seen_at, field, value, seen_at.seen[field], "so were the contexts asked for")


@invariant(
    "selection-equals-reference",
    reads=(*_FLAGS, _DENSE, _EXPANDED[0], *_PREFILL),
    museum=("TRT-99", "TRT-16", "TRT-17"),
    kind=REFERENCE,
    predicates=("P7",),
)
def selection_equals_reference(step: StepCase, check: Check) -> None:
    """In every forward flags, dense rows, expanded lengths and windows of a sparse backend are the reference's."""
    for moment in step.forwards:
        check.said(moment, (*_FLAGS, _DENSE, _EXPANDED[0], *_PREFILL))
