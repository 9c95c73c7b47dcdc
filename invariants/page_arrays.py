"""Page tables as arrays of running totals, and the views of them that drafters read; and sequences of one page.

A target that is told no KV lengths on the device is told pages instead: how many, which, and how full the last one is.
A drafter reads a view of its metadata, which has lengths; whatever is derived from these must move when they do, and
what a view has in common with its original must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

from invariants.block_reuse import taken_twice
from invariants.case import Moment, StepCase
from invariants.check import Check
from invariants.pools import Pool, read_by
from invariants.registry import REFERENCE, invariant
from scenarios import BACKENDS
from scenarios.trace import ENTERED, PREPARED

_TOTALS: Final = ("_paged_kv_indptr_prefill", "_paged_kv_indptr_decode", "_paged_kv_indptr")
_TOKENS: Final = ("_qo_indptr", "_cached_token_lens", "_batch_indices", "_positions")
_RUNTIME: Final = "_draft_kv_runtime_lens"
_LENS: Final = ("_seq_lens", _RUNTIME)
_NAMED: Final = ("block_ids_per_seq", "draft_block_ids_per_seq", "kv_pool_indices", "draft_kv_pool_indices")
_ON_HOST: Final = ("num_blocks", "num_cached_tokens_per_seq")
_LAST: Final = "_paged_kv_last_page_len"
_PAGES: Final = "_paged_kv_indices"


def _lengths(step: StepCase, moment: Moment) -> list[tuple[int, int]] | None:
    """(query, KV length) per row: a view has them, the target's are those that were asked for.

    Under the overlap scheduler they are what the host supposes until a forward has corrected them.
    """
    if "_seq_lens" not in moment.seen:
        return None
    if moment.name.startswith("draft["):
        kv_lens = moment.seen.get(_RUNTIME)
    elif moment.name == PREPARED or moment.phase == "replay":
        kv_lens = _supposed(step)
    else:
        kv_lens = [row.past + row.query for row in step.rows]
    return None if kv_lens is None else list(zip(moment.seen["_seq_lens"], kv_lens, strict=False))


def _supposed(step: StepCase) -> list[int]:
    """KV lengths that the host goes by."""
    return [row.host_past + row.query for row in step.rows]


def _paged(step: StepCase) -> Iterator[tuple[Moment, list[tuple[int, int]]]]:
    """Forwards over such page tables."""
    if BACKENDS[step.config.attention_backend].draft_view:
        for moment in step.forwards:
            rows = _lengths(step, moment)
            if rows is not None:
                yield moment, rows


@invariant(
    "page-arrays-match-layout",
    reads=(*_TOKENS, _LAST, *_LENS, "kv_lens_cuda"),
    museum=("TRT-12", "TRT-16", "TRT-42"),
    predicates=("P7",),
)
def page_arrays_match_layout(step: StepCase, check: Check) -> None:
    """In every forward rows and places of tokens, cached lengths and the last page follow from queries and KV lengths.

    The last page is full where the length is a multiple of its size, never empty. In a view of the target's cache,
    which adds nothing, all of the length is cached. The lengths that any worker moves are those that a view reads.
    """
    for moment, rows in _paged(step):
        shared = step.config.shares_target_kv and moment.name.startswith("draft[")
        page = read_by(step.config, moment).tokens_per_block
        owners = [(row, i) for row, (query, kv) in enumerate(rows) for i in range(kv - query, kv)]
        expected: dict[str, Any] = {
            "_qo_indptr": list(accumulate((query for query, _ in rows), initial=0)),
            "_cached_token_lens": [kv if shared else kv - query for query, kv in rows],
            _LAST: [(kv - 1) % page + 1 for _, kv in rows],
            "kv_lens_cuda": [kv for _, kv in rows],
        }
        if not shared:
            expected |= {"_batch_indices": [row for row, _ in owners], "_positions": [i for _, i in owners]}
        for field, value in expected.items():
            if field in moment.seen:
                check.equal(moment, field, value, moment.seen[field], f"queries and KV lengths are {rows}")


@invariant(
    "kernels-are-planned-for-the-step",
    reads=("planned_num_blocks", "num_blocks"),
    museum=("TRT-161",),
    predicates=("P1",),
)
def kernels_are_planned_for_the_step(step: StepCase, check: Check) -> None:
    """Kernels that are planned on the host, ahead of a forward, were planned for the pages that it finds.

    A plan outlives the step. Nothing in the arrays says whose it is, and a graph that is replayed cannot make one.
    """
    for moment in step.moments:
        seen = moment.seen
        if moment.name in (PREPARED, ENTERED) and {"planned_num_blocks", "num_blocks"} <= seen.keys():
            planned = seen["planned_num_blocks"]
            check.equal(moment, "planned_num_blocks", seen["num_blocks"], planned, "the plan is of another step")


@invariant(
    "page-totals-add-up",
    reads=(*_TOTALS, "num_blocks", _PAGES, "num_contexts", *_LENS),
    museum=("TRT-17", "TRT-42", "VLL-07"),
    predicates=("P7",),
)
def page_totals_add_up(step: StepCase, check: Check) -> None:
    """Running totals of pages, of contexts, generations and both, are those of the pages listed, enough for each row.

    The target lists no page beyond the step's tokens, counted as the host supposes that they lie; a view of a drafter
    may list all that are granted.
    """
    for moment, rows in _paged(step):
        seen = moment.seen
        if "num_blocks" not in seen or "num_contexts" not in seen:
            continue
        counts, first, pool = seen["num_blocks"], seen["num_contexts"], read_by(step.config, moment)
        needed = [pool.pages(kv) for _, kv in rows]
        if moment.name.startswith("draft["):
            enough = len(counts) == len(needed) and all(map(int.__ge__, counts, needed))
            message = f"{counts} pages are listed, {needed} are needed"
            check.that(enough, moment, "num_blocks", needed, counts, message)
        else:
            supposed = list(map(pool.pages, _supposed(step)))
            check.equal(moment, "num_blocks", supposed, counts, "pages of the step's tokens")
        totals = [list(accumulate(part, initial=0)) for part in (counts[:first], counts[first:], counts)]
        for field, expected in zip(_TOTALS, totals, strict=True):
            if field in seen:
                check.equal(moment, field, expected, seen[field], f"num_blocks is {counts}")
        if _PAGES in seen:
            check.equal(moment, _PAGES, counts, list(map(len, seen[_PAGES])), "as many pages as num_blocks says")


@invariant(
    "page-arrays-name-owned-pages",
    reads=(_PAGES, *_NAMED, "kv_blocks", "draft_kv_blocks", *_LENS),
    museum=("TRT-42", "TRT-63", "TRT-65", "VLL-07", "VLL-08"),
    predicates=("P7", "P9"),
)
def page_arrays_name_owned_pages(step: StepCase, check: Check) -> None:
    """Each row's pages are those of its request in the pool that is read, in order, and no other row's.

    But for those of a beginning that prompts share. They are those that the manager names in the same step, as far as
    it says where they lie, and those that the request owns after the step.
    """
    for moment, _ in _paged(step):
        if _PAGES not in moment.seen:
            continue
        tables, pool = moment.seen[_PAGES], read_by(step.config, moment)
        twice = taken_twice(step, pool, zip((row.request for row in step.rows), tables))
        check.that(not twice, moment, _PAGES, [], twice, f"pages {twice} belong to two requests")
        granted = _granted(step, pool)
        if granted is not None:
            expected = [pages[: len(table)] for pages, table in zip(granted, tables, strict=False)]
            check.equal(moment, _PAGES, expected, tables, "there the manager has these pages")
        elif not step.config.host_offload:
            _owned_after(step, moment, pool, check)


def _granted(step: StepCase, pool: Pool) -> list[list[int]] | None:
    """Where the pages granted to each row lie; None if the manager was not asked."""
    seen = step.prepared.seen if step.prepared is not None else {}
    named = "kv_pool_indices" if step.config.host_offload else "block_ids_per_seq"
    return seen.get(pool.field(named))


def _owned_after(step: StepCase, moment: Moment, pool: Pool, check: Check) -> None:
    field = pool.field("kv_blocks")
    after = step.updated.seen.get(field, {}) if step.updated is not None else {}
    for row, pages in zip(step.rows, moment.seen[_PAGES], strict=False):
        if row.request in after:
            length = min(len(pages), len(after[row.request]))
            check.equal(moment, _PAGES, after[row.request][:length], pages[:length], f"so says {field}")


@invariant(
    "page-arrays-equal-reference",
    reads=(*_TOTALS, *_TOKENS, _LAST, *_LENS, *_ON_HOST),
    museum=("TRT-12", "TRT-16", "TRT-42"),
    kind=REFERENCE,
    predicates=("P7",),
)
def page_arrays_equal_reference(step: StepCase, check: Check) -> None:
    """In every forward page totals, cached lengths and places of tokens are the reference's, of views as well.

    What the target keeps on the host of pages, or of lengths, is the same before and after its drafter's calls.
    """
    for moment, _ in _paged(step):
        check.said(moment, (*_TOTALS, *_TOKENS, _LAST, _RUNTIME))
    for moment in step.moments:
        check.said(moment, _ON_HOST)


@invariant(
    "one-page-per-sequence",
    reads=("cache_indices", "num_cached_tokens_per_seq", "block_ids_per_seq", "kv_pool_indices"),
    museum=("TRT-42", "VLL-07"),
    predicates=("P7", "P10"),
)
def one_page_per_sequence(step: StepCase, check: Check) -> None:
    """Where a sequence lies in one page, each row has the page of its own request, and what is cached in it.

    At every sub-step: nothing of it changes before the next ``prepare``.
    """
    for moment in step.moments:
        seen = moment.seen
        if "num_cached_tokens_per_seq" in seen:
            cached = [row.past for row in step.rows]
            check.equal(moment, "num_cached_tokens_per_seq", cached, seen["num_cached_tokens_per_seq"], "so was asked")
        if "cache_indices" in seen:
            pages = seen["cache_indices"]
            alone = list(map(len, pages)) == [1] * len(step.rows)
            check.that(alone, moment, "cache_indices", "one page each", pages, f"rows have pages {pages}")
            granted = _granted(step, read_by(step.config, moment))
            if granted is not None:
                check.equal(moment, "cache_indices", granted, pages, "there the manager has them")
