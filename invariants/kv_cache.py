"""The KV cache: a ledger of tokens and pages that balances, tables that name owned pages, and what they hold."""

from __future__ import annotations

from itertools import chain
from typing import Final

from invariants.case import StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant
from invariants.rows import prompt
from scenarios.tracer import entry

CONTENT: Final = ("target_kv", "draft_kv", "draft_layers_kv", "target_indexer_kv", "draft_indexer_kv", "draft_context")
"""What the caches hold for each request; a drafter has one, one per layer or a context of its own."""


@invariant(
    "kv-ledger-balanced",
    reads=("kv_tokens", "kv_blocks", "free_blocks", "py_rewind_len"),
    museum=("TRT-35", "TRT-39", "TRT-40", "TRT-41", "TRT-47", "TRT-66", "TRT-69", "SGL-01"),
)
def kv_ledger_balanced(step: StepCase, check: Check) -> None:
    """Every token and page is accounted for: granted, rewound, owned by one request, or free.

    A generation gains ``1 + width - py_rewind_len`` tokens, a prompt is granted once, whole; pages are
    ``ceil(tokens / tokens_per_block)``; no page has two owners; owned and free pages are the pool, so when
    requests finish or fail, or dummies are freed, all of theirs are free again.
    """
    moment = step.ledger
    if moment is None or "kv_tokens" not in moment.seen:
        return
    seen, size = moment.seen, step.config.tokens_per_block
    tokens = seen["kv_tokens"]
    expected = _tokens(step, seen.get("py_rewind_len", {}))
    if expected is not None:
        check.equal(moment, "kv_tokens", expected, tokens, "what was held, granted and rewound")
    if "free_blocks" in seen:
        free = step.config.num_blocks - sum(-(-n // size) for n in tokens.values())
        check.equal(moment, "free_blocks", free, seen["free_blocks"], "pages that nobody owns")
    if "kv_blocks" in seen:
        blocks = seen["kv_blocks"]
        counts = {r: -(-n // size) for r, n in tokens.items()}
        check.equal(moment, "kv_blocks", counts, {r: len(b) for r, b in blocks.items()}, "pages that the tokens need")
        owned = list(chain.from_iterable(blocks.values()))
        twice = sorted({page for page in owned if owned.count(page) > 1}) if len(set(owned)) < len(owned) else []
        check.that(not twice, moment, "kv_blocks", [], twice, f"pages {twice} are owned twice")


def _tokens(step: StepCase, rewinds: dict[int, int]) -> dict[int, int] | None:
    """Tokens per request, from those of the step before; None if they were not observed."""
    rows = {row.request: row for row in step.rows}
    before = step.before.ledger if step.before is not None else None
    held = before.seen.get("kv_tokens", {}) if before is not None else {}
    tokens = {}
    for request in step.active:
        row = rows.get(request)
        if row is not None and row.is_context and row.past == 0:
            tokens[request] = row.granted
            continue
        generates = row is not None and not row.is_context
        if request not in held or (generates and request not in rewinds):
            return None
        tokens[request] = held[request] + (1 + step.width - rewinds[request] if generates else 0)
    return tokens


@invariant(
    "tables-name-owned-pages",
    reads=("kv_cache_block_offsets", "kv_blocks"),
    museum=("TRT-42", "TRT-62", "TRT-65", "TRT-69", "TRT-90", "TRT-91", "VLL-07", "SGL-04"),
)
def tables_name_owned_pages(step: StepCase, check: Check) -> None:
    """The block table of a row names the pages of its request, in order, for every token granted, and no other's.

    Pages stay in place from step to step; a rewind drops pages from the end.
    """
    moment = step.prepared
    if moment is None or "kv_cache_block_offsets" not in moment.seen:
        return
    tables = moment.seen["kv_cache_block_offsets"]
    sizes = [-(-row.granted // step.config.tokens_per_block) for row in step.rows]
    field = "kv_cache_block_offsets"
    check.equal(moment, field, sizes, [len(pages) for pages in tables], "pages that hold the granted tokens")
    owned = _owned_before(step)
    used = [*chain.from_iterable(tables), *chain.from_iterable(owned[r] for r in owned.keys() - _requests(step))]
    twice = sorted({page for page in used if used.count(page) > 1}) if len(set(used)) < len(used) else []
    check.that(not twice, moment, field, [], twice, f"pages {twice} belong to two requests")
    after = step.updated.seen.get("kv_blocks", {}) if step.updated is not None else {}
    for row, pages in zip(step.rows, tables, strict=False):
        if row.request in owned:
            kept = owned[row.request]
            check.equal(moment, field, kept, pages[: len(kept)], f"pages that request {row.request} owned before")
        if row.request in after:
            left = after[row.request]
            check.equal(
                moment, field, left, pages[: len(left)], f"pages that request {row.request} owns after the step"
            )


def _requests(step: StepCase) -> set[int | None]:
    return {row.request for row in step.rows}


def _owned_before(step: StepCase) -> dict[int | None, list[int]]:
    """Pages of the requests that are active when the step starts."""
    before = step.before
    if before is None or before.ledger is None:
        return {}
    blocks = before.ledger.seen.get("kv_blocks", {})
    return {request: pages for request, pages in blocks.items() if request not in before.asked.finish}


@invariant(
    "target-cache-holds-the-text",
    reads=("target_kv", "emitted"),
    museum=("TRT-35", "TRT-66", "VLL-07", "VLL-22"),
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
    reads=("kv_tokens", "free_blocks", "py_rewind_len", "py_num_accepted_draft_tokens"),
    museum=("TRT-35", "TRT-36", "TRT-39", "TRT-66", "SGL-01"),
    kind=REFERENCE,
)
def kv_ledger_equals_reference(step: StepCase, check: Check) -> None:
    """After each step, and after a failure that was handled, tokens held and pages free are the reference's."""
    if step.ledger is not None:
        check.said(step.ledger, ("kv_tokens", "free_blocks", "py_rewind_len", "py_num_accepted_draft_tokens"))


@invariant(
    "kv-content-equals-reference",
    reads=CONTENT,
    museum=("TRT-12", "TRT-62", "TRT-66", "TRT-70", "TRT-94", "VLL-07", "VLL-22", "SGL-11"),
    kind=REFERENCE,
)
def kv_content_equals_reference(step: StepCase, check: Check) -> None:
    """Each slot of every cache, target's and drafter's, holds its own position and token, up to what is committed."""
    if step.updated is not None and step.active:
        check.said(step.updated, CONTENT)
