"""Block reuse: pages of a computed prompt that requests share whose prompts begin with the same tokens.

A page is known by its *key*: the tokens up to its end and, where a drafter's slots hold the token after their own, the
next one. What is said of a manager holds for the target's and, with a separate draft KV cache, for the drafter's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any, Final

from invariants.case import Moment, Row, StepCase
from invariants.check import Check
from invariants.pools import Pool, pools
from invariants.registry import REFERENCE, invariant
from invariants.rows import prompt
from scenarios.reuse import look_ahead
from scenarios.tracer import EMPTY, entry

_KNOWN: Final = ("known_pages", "draft_known_pages")
_IDS: Final = ("known_page_ids", "draft_known_page_ids")
_ORDER: Final = ("reclaim_order", "draft_reclaim_order")
_BLOCKS: Final = ("kv_blocks", "draft_kv_blocks")
_CONTENT: Final = ("known_kv", "known_draft_kv")


def taken_twice(step: StepCase, pool: Pool, tables: Iterable[tuple[int | None, Sequence[int]]]) -> list[int]:
    """Pages that several requests have, or one twice, and may not: dummies and all without block reuse.

    With it prompts that begin alike may have the same page in the same place.

    tables  per request, None for a dummy, its pages in order
    """
    places: dict[int, list[tuple[int | None, int]]] = defaultdict(list)
    for request, pages in tables:
        for index, page in enumerate(pages):
            places[page].append((request, index))
    return sorted(page for page, holders in places.items() if len(holders) > 1 and not _alike(step, pool, holders))


def _alike(step: StepCase, pool: Pool, holders: Sequence[tuple[int | None, int]]) -> bool:
    """Whether all holders have the page in the same place, and prompts with the same key for it."""
    requests, (index, *others) = {request for request, _ in holders}, {index for _, index in holders}
    if not step.config.enable_block_reuse or others or None in requests or len(requests) < len(holders):
        return False
    length = (index + 1) * pool.tokens_per_block + look_ahead(step.config)
    keys = {_prompt(step, request)[:length] for request in requests if request is not None}
    return len(keys) == 1 and len(keys.pop()) == length


def _prompt(step: StepCase, request: int) -> tuple[int, ...]:
    return prompt(step.config.seed, step.case.requests[request])


@invariant(
    "known-pages-count-their-owners",
    reads=(*_KNOWN, *_IDS, *_ORDER, *_BLOCKS),
    museum=("TRT-66", "SGL-11"),
    predicates=("P9",),
)
def known_pages_count_their_owners(step: StepCase, check: Check) -> None:
    """A manager counts, for each page that it knows, the requests that own it; it takes none that anybody owns.

    Their prompts begin with the tokens by which it is known, and it is the page of these tokens. Each page is known
    once; in the order in which pages give way are those that nobody owns.
    """
    for pool in pools(step.config):
        fields = [pool.field(of[0]) for of in (_KNOWN, _IDS, _ORDER, _BLOCKS)]
        if step.ledger is not None and all(field in step.ledger.seen for field in fields):
            _counted(step, pool, step.ledger, check)


def _counted(step: StepCase, pool: Pool, moment: Moment, check: Check) -> None:
    of_known, of_ids, of_order, of_blocks = (pool.field(of[0]) for of in (_KNOWN, _IDS, _ORDER, _BLOCKS))
    known, ids, blocks = moment.seen[of_known], moment.seen[of_ids], moment.seen[of_blocks]
    again = sorted({page for page in ids if ids.count(page) > 1})
    check.that(not again, moment, of_ids, [], again, f"pages {again} are known by two keys")
    owners = [[request for request, pages in blocks.items() if page in pages] for page in ids]
    counted = [[len(of), *key] for of, (_, *key) in zip(owners, known, strict=False)]
    check.equal(moment, of_known, counted, known, f"so says {of_blocks}")
    idle = [i for i, of in enumerate(owners) if not of]
    check.equal(moment, of_order, idle, sorted(moment.seen[of_order]), "pages that nobody owns")
    for page, of, (_, *key) in zip(ids, owners, known, strict=False):
        index = (len(key) - look_ahead(step.config)) // pool.tokens_per_block - 1
        strangers = [r for r in of if blocks[r].index(page) != index or [*_prompt(step, r)[: len(key)]] != key]
        message = f"page {page} is page {index} of a prompt that begins with {key}"
        check.that(not strangers, moment, of_blocks, [], strangers, message)


@invariant(
    "prompts-start-behind-known-pages",
    reads=("position_ids", "_seq_lens", "reused_tokens", *_KNOWN),
    museum=("TRT-66", "SGL-11"),
    predicates=("P7", "P9"),
)
def prompts_start_behind_known_pages(step: StepCase, check: Check) -> None:
    """A prompt starts behind its longest beginning that known pages of every cache hold, and computes a token at least.

    PR #5448: a manager goes by what it knows itself. A drafter's cache that knows less makes the target compute the
    rest again; what is known counts before the step, and none that starts in it.
    """
    prepared, settled = step.prepared, step.settled
    if prepared is None or settled is None or settled.ledger is None or not step.config.enable_block_reuse:
        return
    expected = {
        row.request: _reusable(step, settled.ledger, row.request)
        for row in step.rows
        if row.before is None and row.request is not None
    }
    if None in expected.values():
        return
    if "position_ids" in prepared.seen and "_seq_lens" in prepared.seen:
        firsts = [_first(prepared, row) for row in step.rows if row.request in expected]
        check.equal(prepared, "position_ids", [*expected.values()], firsts, "first positions of prompts that start")
    if step.updated is not None and "reused_tokens" in step.updated.seen:
        reused = step.updated.seen["reused_tokens"]
        shown = {request: reused.get(request) for request in expected}
        check.equal(step.updated, "reused_tokens", expected, shown, "tokens of known pages")


def _reusable(step: StepCase, before: Moment, request: int) -> int | None:
    """Tokens that a prompt finds in known pages of every pool; None if these were not observed."""
    tokens, most, unit = _prompt(step, request), -1, 1
    for pool in pools(step.config):
        if pool.field("known_pages") not in before.seen:
            return None
        matched = min(len(tokens) - 1, _matched(pool, before, tokens, look_ahead(step.config)))
        most = matched if most < 0 else min(most, matched)
        unit = lcm(unit, pool.tokens_per_block)
    return most - most % unit


def _matched(pool: Pool, moment: Moment, tokens: tuple[int, ...], ahead: int) -> int:
    """With how many of these tokens known pages of a pool begin."""
    keys = {tuple(key) for _, *key in moment.seen[pool.field("known_pages")]}
    length = 0
    while (key := tokens[: length + pool.tokens_per_block + ahead]) in keys and len(key) > length + ahead:
        length += pool.tokens_per_block
    return length


def _first(moment: Moment, row: Row) -> Any:
    """Position of the first token that a row feeds, None if it feeds none."""
    lens: list[int] = moment.seen["_seq_lens"]
    fed = lens[row.index] if row.index < len(lens) else 0
    return moment.seen["position_ids"][sum(lens[: row.index])] if fed > 0 else None


@invariant(
    "known-pages-hold-their-prompt",
    reads=(*_KNOWN, *_CONTENT),
    museum=("SGL-11", "TRT-66", "VLL-22"),
    predicates=("P9", "P14"),
)
def known_pages_hold_their_prompt(step: StepCase, check: Check) -> None:
    """A known page holds the tokens by which it is known, of target and drafter, as long as it is known.

    Whoever owns it writes behind it; a drafter that is one token ahead needs the token after it, which is in the key.
    """
    moment = step.ledger
    if moment is None:
        return
    of_pools = pools(step.config)
    for field, pool, ahead in zip(_CONTENT, (of_pools[0], of_pools[-1]), (0, look_ahead(step.config)), strict=True):
        known = pool.field("known_pages")
        if field not in moment.seen or known not in moment.seen:
            continue
        writes = field == "known_kv" or (step.traits.draft_model and not step.config.shares_target_kv)
        ends = [(key, len(key) - look_ahead(step.config)) for _, *key in moment.seen[known]]
        expected = [
            [entry(n, key[n + ahead]) if writes else EMPTY for n in range(end - pool.tokens_per_block, end)]
            for key, end in ends
        ]
        check.equal(moment, field, expected, moment.seen[field], f"so goes {known}")


@invariant(
    "block-reuse-equals-reference",
    reads=("reused_tokens", *_KNOWN, *_ORDER, *_CONTENT),
    museum=("TRT-66", "SGL-11"),
    kind=REFERENCE,
    predicates=("P9",),
)
def block_reuse_equals_reference(step: StepCase, check: Check) -> None:
    """What requests reuse, which pages are known, by whom owned, and which give way first, is the reference's."""
    if step.ledger is not None:
        check.said(step.ledger, ("reused_tokens", *_KNOWN, *_ORDER, *_CONTENT))
