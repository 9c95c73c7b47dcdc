"""Falsified traces of engines whose requests share pages."""

from __future__ import annotations

from typing import Any

from scenarios.tracer import EMPTY
from tests.invariants.cases import EAGLE, PARD, SA, overlapping, sharing, sparse
from tests.invariants.mutation import Mutation, at, bump, put, set_to, swap

SHARED = sharing(EAGLE)
APART = sharing(EAGLE, use_separate_draft_kv_cache=True, draft_num_blocks=60, draft_tokens_per_block=2)
SHARING = [SHARED, APART, sharing(PARD), sharing(SA), overlapping(SHARED), sparse(SHARED), sparse(APART)]


def _other_page(request: int, index: int, page: int) -> Any:
    """One page of a request is another one."""

    def change(blocks: Any) -> Any:
        blocks[request][index] = page
        return blocks

    return change


def _stale(tables: Any) -> Any:
    """The last slot of the last page holds what it held for another prompt."""
    tables[-1][-1] += 1
    return tables


REUSE_MUTATIONS: list[Mutation] = [
    # An owner too many, one that has left; pages that have changed names; one taken twice, and one from an owner.
    at("known-pages-count-their-owners", SHARED, 1, "updated", "known_pages", lambda k: [[3, *k[0][1:]], *k[1:]]),
    at("known-pages-count-their-owners", SHARED, 3, "updated", "known_pages", lambda k: [[2, *k[0][1:]], *k[1:]]),
    at("known-pages-count-their-owners", APART, 1, "updated", "draft_known_pages", lambda k: [[1, *k[0][1:]], *k[1:]]),
    at("known-pages-count-their-owners", SHARED, 2, "updated", "known_page_ids", lambda ids: [ids[0], ids[0]]),
    Mutation(
        "known-pages-count-their-owners",
        SHARED,
        at("", SHARED, 1, "updated", "known_page_ids", swap).falsify,
        1,
        "updated",
        "kv_blocks",
    ),
    set_to("known-pages-count-their-owners", SHARED, 5, "updated", "reclaim_order", []),
    set_to("known-pages-count-their-owners", SHARED, 6, "updated", "reclaim_order", [1, 1]),
    # Everything is computed again, or nothing is left to compute; the drafter goes by what the target knows.
    at("prompts-start-behind-known-pages", SHARED, 1, "prepared", "position_ids", bump(0, by=-4)),
    set_to("prompts-start-behind-known-pages", SHARED, 3, "updated", "reused_tokens", {1: 8, 2: 0}),
    Mutation(
        "prompts-start-behind-known-pages",
        SHARED,
        at("", SHARED, 1, "prepared", "_seq_lens", put(0, 0)).falsify,
        1,
        "prepared",
        "position_ids",
    ),
    at("prompts-start-behind-known-pages", APART, 1, "prepared", "position_ids", bump(0, by=1)),
    # A page that was emptied when it was shared; one whose last slot is about the prompt before.
    at("known-pages-hold-their-prompt", SHARED, 1, "updated", "known_kv", put(0, [EMPTY] * 4)),
    at("known-pages-hold-their-prompt", SHARED, 1, "updated", "known_draft_kv", _stale),
    at("known-pages-hold-their-prompt", APART, 3, "updated", "known_draft_kv", _stale),
    at("known-pages-hold-their-prompt", SHARED, 6, "updated", "known_kv", swap),
    # What was released last gives way first; a page is known after its room was taken.
    at("block-reuse-equals-reference", SHARED, 6, "updated", "reclaim_order", lambda order: order[::-1]),
    at("block-reuse-equals-reference", SHARED, 6, "updated", "known_pages", lambda known: known[:1]),
    at("block-reuse-equals-reference", APART, 2, "updated", "draft_reclaim_order", lambda order: [*order, 0]),
    at("block-reuse-equals-no-reuse", SHARED, 1, "updated", "target_kv", lambda kv: {**kv, 1: [EMPTY] * len(kv[1])}),
    at("block-reuse-equals-no-reuse", SHARED, 3, "updated", "emitted", lambda said: {**said, 2: [7]}),
    # A shared page that is free with its first owner; pages that are shared by prompts that do not begin alike.
    at("kv-ledger-balanced", SHARED, 1, "updated", "free_blocks", lambda free: free + 1),
    at("kv-ledger-balanced", SHARED, 1, "updated", "kv_blocks", _other_page(1, 2, 2)),
    at("kv-ledger-balanced", SHARED, 3, "updated", "kv_blocks", _other_page(2, 1, 1)),
    at("tables-name-owned-pages", SHARED, 1, "prepared", "kv_cache_block_offsets", _other_page(0, 2, 2)),
    at("tables-name-owned-pages", SHARED, 2, "prepared", "kv_cache_block_offsets", _other_page(1, 0, 30)),
]
