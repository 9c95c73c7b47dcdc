"""The KV caches: ledgers of tokens and pages that balance, tables that name owned pages, and what they hold.

What is said of a manager holds for the target's and, with a separate draft KV cache, for the drafter's (``pools``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from invariants.block_reuse import taken_twice
from invariants.case import Moment, Row, StepCase
from invariants.check import Check
from invariants.pools import Pool, pools
from invariants.registry import REFERENCE, invariant
from invariants.rows import prompt
from scenarios.tracer import entry

CONTENT: Final = (
    *("target_kv", "draft_kv", "draft_layers_kv", "target_indexer_kv", "draft_indexer_kv", "draft_context"),
    "target_compressed_kv",
)
"""What the caches hold for each request; a drafter has one, one per layer or a context of its own."""


_LEDGER: Final = ("kv_tokens", "kv_blocks", "free_blocks", "draft_kv_tokens", "draft_kv_blocks", "draft_free_blocks")
_COUNTED: Final = (
    "kv_tokens",
    "free_blocks",
    "draft_kv_tokens",
    "draft_free_blocks",
    "py_rewind_len",
    "py_num_accepted_draft_tokens",
)
_SERVED: Final = (*_COUNTED, "emitted", "sa_requests", "relaxed_delta", "relaxed_delta_left", "connector_num_tokens")
_HELD: Final = (*_SERVED, "held_for_nobody")
_TABLES: Final = (
    "kv_cache_block_offsets",
    "draft_kv_cache_block_offsets",
    "block_ids_per_seq",
    "draft_block_ids_per_seq",
    "kv_blocks",
    "draft_kv_blocks",
)


@invariant(
    "kv-ledger-balanced",
    reads=(*_LEDGER, "py_rewind_len"),
    museum=("TRT-35", "TRT-39", "TRT-40", "TRT-41", "TRT-47", "TRT-60", "TRT-66", "TRT-68", "TRT-69", "SGL-01"),
    predicates=("P9", "P11"),
)
def kv_ledger_balanced(step: StepCase, check: Check) -> None:
    """Every token and page of a pool is accounted for: granted, rewound, owned, or free.

    A generation gains what it feeds less ``py_rewind_len``, a prompt is granted once, whole; pages are
    ``ceil(tokens / tokens_per_block)``; no page has two owners, but for those of a beginning that prompts share;
    owned and free pages are the pool, so when requests finish or fail, or dummies are freed, all of theirs are free
    again, shared ones with their last owner.
    """
    # An iteration without rows grants nothing and has nothing to take back.
    if step.ledger is not None and step.rows:
        for pool in pools(step.config):
            _balanced(step, step.ledger, pool, check)


@invariant(
    "managers-forget-the-ended", reads=("held_for_nobody",), museum=("TRT-42", "TRT-69"), predicates=("P9", "P11")
)
def managers_forget_the_ended(step: StepCase, check: Check) -> None:
    """No manager's table has an entry of a request that has ended, by finishing or by a failure.

    Pages and slots can be back in the pool while what was known of the request stays: a leak, and a lie to the next
    request with this id.
    """
    for moment in step.moments:
        if "held_for_nobody" in moment.seen:
            check.equal(moment, "held_for_nobody", [], moment.seen["held_for_nobody"], "who has ended owns nothing")


def _balanced(step: StepCase, moment: Moment, pool: Pool, check: Check) -> None:
    seen = moment.seen
    of_tokens, of_blocks, of_free = map(pool.field, ("kv_tokens", "kv_blocks", "free_blocks"))
    if of_tokens not in seen:
        return
    tokens = seen[of_tokens]
    expected = _tokens(step, seen.get("py_rewind_len", {}), of_tokens)
    if expected is not None:
        check.equal(moment, of_tokens, expected, tokens, "what was held, granted and rewound")
    shares = step.config.enable_block_reuse
    if of_free in seen and (of_blocks in seen or not shares):
        shared = _shared(seen[of_blocks]) if shares else 0
        free = pool.num_blocks - sum(map(pool.pages, tokens.values())) + shared
        check.equal(moment, of_free, free, seen[of_free], "pages that nobody owns")
    if of_blocks in seen:
        blocks = seen[of_blocks]
        counts = {r: pool.pages(n) for r, n in tokens.items()}
        check.equal(moment, of_blocks, counts, {r: len(b) for r, b in blocks.items()}, "pages that the tokens need")
        twice = taken_twice(step, pool, blocks.items())
        check.that(not twice, moment, of_blocks, [], twice, f"pages {twice} are owned twice")


def _shared(blocks: Mapping[int, Sequence[int]]) -> int:
    """By how many a sum over all requests counts too many pages, as some have several owners."""
    owned = [*chain.from_iterable(blocks.values())]
    return len(owned) - len(set(owned))


def _tokens(step: StepCase, rewinds: dict[int, int], field: str) -> dict[int, int] | None:
    """Tokens per request, from those of the step before; None if they were not observed.

    Under the overlap scheduler the rows of the next step have been granted theirs by then.
    """
    before = step.before_with_rows
    held = before.ledger.seen.get(field, {}) if before is not None and before.ledger is not None else {}
    counted = before.launched.index if before is not None else -1
    tokens = {request: held[request] for request in step.held if request in held}
    generates = {row.request for row in step.rows if not row.is_context and not row.wasted}
    if not generates & {*step.held} <= rewinds.keys():
        return None
    for since in {id(s): s for s in (step, step.launched)}.values():
        for row in since.rows if since.index > counted else ():
            if row.request is not None and row.request in step.held:
                first = row.before is None
                if not first and row.request not in tokens:
                    return None
                tokens[row.request] = row.granted if first else tokens[row.request] + _grant(row)
    if tokens.keys() != {*step.held}:
        return None
    return {request: count - rewinds.get(request, 0) for request, count in tokens.items()}


def _grant(row: Row) -> int:
    """Tokens that a row is granted after the first chunk of its prompt."""
    return 0 if row.is_context else row.query


@invariant(
    "tables-name-owned-pages",
    reads=_TABLES,
    museum=("TRT-42", "TRT-62", "TRT-65", "TRT-69", "TRT-90", "TRT-91", "VLL-07", "SGL-04"),
    predicates=("P7", "P9"),
)
def tables_name_owned_pages(step: StepCase, check: Check) -> None:
    """The block table of a row names the pages of its request, in order, for every token granted, and no other's.

    Pages stay in place from step to step; a rewind drops pages from the end. What moves with host offload is where
    a page lies, so there its id stands for it; and where the metadata has no block table, ids are told instead.
    """
    moment = step.prepared
    if moment is None:
        return
    for pool in pools(step.config):
        table = pool.field("kv_cache_block_offsets")
        named = table if table in moment.seen and not step.config.host_offload else pool.field("block_ids_per_seq")
        for field in {table: None, named: None}:
            if field in moment.seen:
                _sized(step, moment, pool, field, check)
        if named in moment.seen:
            _owned(step, moment, pool, named, check)


def _sized(step: StepCase, moment: Moment, pool: Pool, field: str, check: Check) -> None:
    """As many places as the granted tokens need, none of them twice but where prompts share their beginning."""
    tables = moment.seen[field]
    sizes = [pool.pages(row.granted) for row in step.rows]
    check.equal(moment, field, sizes, [len(pages) for pages in tables], "pages that hold the granted tokens")
    twice = taken_twice(step, pool, zip((row.request for row in step.rows), tables))
    check.that(not twice, moment, field, [], twice, f"pages {twice} belong to two requests")


def _owned(step: StepCase, moment: Moment, pool: Pool, field: str, check: Check) -> None:
    """The pages that each request owned before and owns after the step, and none of a request that is not here."""
    tables, of_blocks = moment.seen[field], pool.field("kv_blocks")
    owned = _owned_before(step, of_blocks)
    present = [row.request for row in step.rows]
    absent = {r: pages for r, pages in owned.items() if r not in present}
    named, elsewhere = {*chain.from_iterable(tables)}, {*chain.from_iterable(absent.values())}
    taken = sorted(named & elsewhere & {*taken_twice(step, pool, [*zip(present, tables), *absent.items()])})
    check.that(not taken, moment, field, [], taken, f"pages {taken} belong to a request that is not in the batch")
    # Under the overlap scheduler the step before takes its drafts back now, and then the next one is granted pages.
    over = step.flying if step.overlaps else step
    after = over.updated.seen.get(of_blocks, {}) if over is not None and over.updated is not None else {}
    for row, pages in zip(step.rows, tables, strict=False):
        if row.request in owned:
            kept = owned[row.request]
            check.equal(moment, field, kept, pages[: len(kept)], f"pages that request {row.request} owned before")
        if row.request in after:
            left = after[row.request]
            check.equal(
                moment, field, left, pages[: len(left)], f"pages that request {row.request} owns after the step"
            )


def _owned_before(step: StepCase, field: str) -> dict[int | None, list[int]]:
    """Pages of the requests that are active when the step starts."""
    before = step.settled
    if before is None or before.ledger is None:
        return {}
    blocks = before.ledger.seen.get(field, {})
    return {request: pages for request, pages in blocks.items() if request not in before.asked.finish}


@invariant(
    "target-cache-holds-the-text",
    reads=("target_kv", "emitted"),
    museum=("TRT-35", "TRT-66", "VLL-07", "VLL-22"),
    predicates=("P9",),
)
def target_cache_holds_the_text(step: StepCase, check: Check) -> None:
    """Slot n of the target's cache holds token n of prompt and output, at position n.

    The path that is accepted in a tree is moved there; rejected nodes and later positions are not left in between.
    """
    moment = step.updated
    if moment is None or "target_kv" not in moment.seen:
        return
    case = step.case
    for request, slots in moment.seen["target_kv"].items():
        emitted = moment.seen.get("emitted", {}).get(request)
        if emitted is not None:
            text = [*prompt(case.config.seed, case.requests[request]), *emitted]
            expected = list(map(entry, range(len(slots)), text))
            check.equal(moment, "target_kv", expected, slots, f"the text of request {request}")


@invariant(
    "kv-ledger-equals-reference",
    reads=_HELD,
    museum=("TRT-35", "TRT-36", "TRT-39", "TRT-60", "TRT-66", "TRT-68", "SGL-01"),
    kind=REFERENCE,
    predicates=("P9",),
)
def kv_ledger_equals_reference(step: StepCase, check: Check) -> None:
    """After each step, and after a failure that was handled, tokens held and pages free are the reference's.

    So is what has been emitted, and what else is kept per request as the ledgers are.
    """
    if step.ledger is not None:
        check.said(step.ledger, _HELD)


@invariant(
    "kv-content-equals-reference",
    reads=CONTENT,
    museum=("TRT-12", "TRT-62", "TRT-66", "TRT-70", "TRT-94", "VLL-07", "VLL-22", "SGL-11"),
    kind=REFERENCE,
    predicates=("P9", "P14"),
)
def kv_content_equals_reference(step: StepCase, check: Check) -> None:
    """Each slot of every cache, target's and drafter's, holds its own position and token, up to what is committed."""
    if step.updated is not None and step.active:
        check.said(step.updated, CONTENT)
