"""Falsified traces of engines with two KV-cache managers, and of pages that move."""

from __future__ import annotations

from typing import Any

from scenarios import Context, Generation, Request, Scenario, Step, Trace, check
from tests.invariants.cases import EAGLE, failing, separate, served, sparse, started_up
from tests.invariants.mutation import Mutation, at, bump, put, set_to, swap
from tests.invariants.synthetic import edit

MIXED = served(EAGLE)
APART, APART_FAILING, APART_SPARSE = separate(MIXED), separate(failing(EAGLE)), separate(sparse(MIXED))
APART_STARTED = separate(started_up(EAGLE))
MOVING = separate(MIXED, kv_cache_manager="V2", host_offload=True)
# Pages 3, 4 and 5 are those of request 1, which is not in the second batch.
ABSENT = check(
    Scenario(
        config=MIXED.config,
        requests=(Request(id=0, prompt_len=5), Request(id=1, prompt_len=5)),
        steps=(
            Step(draft_len=3, contexts=(Context(request=0, chunk=5), Context(request=1, chunk=5))),
            Step(draft_len=3, generations=(Generation(request=0),)),
        ),
    )
)
TABLE, DRAFT_TABLE = "kv_cache_block_offsets", "draft_kv_cache_block_offsets"


def _reads_target_pages(trace: Trace) -> Trace:
    """The first draft call of step 1 finds the tables of the target."""
    prepared = trace.steps[1].substeps[0]
    return edit(trace, 1, "draft[0]", "kv_cache_block_offsets", lambda _: prepared["kv_cache_block_offsets"])


def _stays_swapped(trace: Trace) -> Trace:
    """The failure of step 2 leaves the tables of the drafter in place."""
    prepared = trace.steps[2].substeps[0]
    return edit(trace, 2, "failed", "kv_cache_block_offsets", lambda _: prepared["draft_kv_cache_block_offsets"])


def _back(tables: Any) -> Any:
    """Each page one place nearer, where it was the step before."""
    return [[page - 1 for page in pages] for pages in tables]


MANAGER_MUTATIONS = [
    # Drafting beside the swap, a swap that is not undone, and one where there is nothing to swap.
    set_to("manager-follows-forward", APART, 1, "draft[1]", "kv_cache_manager", "target"),
    set_to("manager-follows-forward", APART, 1, "restored", "kv_cache_manager", "draft"),
    set_to("manager-follows-forward", APART_FAILING, 2, "failed", "kv_cache_manager", "draft"),
    set_to("manager-follows-forward", MIXED, 1, "draft[0]", "kv_cache_manager", "draft"),
    # Half a swap, rows exchanged in it, half of it undone, and tables of the drafter written to by the target.
    Mutation("tables-follow-manager", APART, _reads_target_pages, 1, "draft[0]", TABLE),
    at("tables-follow-manager", APART, 1, "draft[1]", TABLE, swap),
    Mutation("tables-follow-manager", APART_FAILING, _stays_swapped, 2, "failed", TABLE),
    at("tables-follow-manager", APART, 1, "restored", DRAFT_TABLE, swap),
    at("tables-follow-manager", MIXED, 1, "restored", TABLE, swap),
    # A rewind in one manager, and pages that one of them keeps after a failure.
    at("both-managers-hold-the-same-tokens", APART, 2, "updated", "draft_kv_tokens", bump(0, by=2)),
    set_to("both-managers-hold-the-same-tokens", APART_FAILING, 2, "failed", "draft_kv_tokens", {0: 11}),
    # Ids in place of indices, inside the pool and beyond its end.
    at("kernels-get-pool-indices", MOVING, 1, "prepared", DRAFT_TABLE, _back),
    at("kernels-get-pool-indices", MOVING, 1, "prepared", TABLE, _back),
    at("kernels-get-pool-indices", APART, 1, "prepared", DRAFT_TABLE, lambda t: [[60, *t[0][1:]], t[1]]),
    at("connector-knows-owned-pages", MIXED, 2, "updated", "connector_block_ids", lambda b: {**b, 0: [*b[0], 9]}),
    # Drafts that were not accepted are saved, too.
    at("connector-saves-what-is-committed", MIXED, 2, "updated", "connector_num_tokens", bump(1, by=2)),
    at("kv-ledger-balanced", APART, 2, "updated", "draft_kv_tokens", bump(0)),
    at("kv-ledger-balanced", APART, 2, "updated", "draft_kv_blocks", lambda b: {0: b[1], 1: b[1]}),
    at("kv-ledger-balanced", APART, 2, "updated", "draft_free_blocks", lambda n: n - 1),
    at("kv-ledger-balanced", APART_FAILING, 0, "failed", "draft_free_blocks", lambda n: n - 4),
    at("kv-ledger-equals-reference", APART, 2, "updated", "draft_free_blocks", lambda n: n - 1),
    at("tables-name-owned-pages", APART, 1, "prepared", DRAFT_TABLE, swap),
    at("tables-name-owned-pages", APART, 1, "prepared", DRAFT_TABLE, lambda t: [t[0][:-1], t[1]]),
    at("tables-name-owned-pages", MOVING, 2, "prepared", "draft_block_ids_per_seq", swap),
    at("tables-name-owned-pages", MOVING, 2, "prepared", DRAFT_TABLE, lambda t: [t[0], t[0]]),
    at("tables-name-owned-pages", ABSENT, 1, "prepared", TABLE, lambda t: [[*t[0][:-1], 3]]),
    # 16 tokens: room for them in the pages of the target, not in those of the drafter.
    at("kv-lens-within-pages", APART, 1, "draft[2]", "kv_lens_cuda", put(1, 16)),
    at("sparse-tables-name-owned-pages", APART_SPARSE, 2, "draft[1]", "block_table", swap),
    at("sparse-tables-name-owned-pages", APART_SPARSE, 2, "draft[1]", "indexer_k_cache_block_offsets", lambda t: [
        pages[:-1] for pages in t
    ]),
    at("sparse-tables-name-owned-pages", APART_SPARSE, 2, "restored", "block_table", swap),
    set_to("graph-copies-share-no-state", APART_STARTED, 3, "entered", "shared_with_eager", ["kv_cache_manager"]),
    # Pages of the target, for rows of the draft call that read them one by one, and keys of contexts found nowhere.
    at("expanded-rows-follow-their-generation", APART_SPARSE, 2, "draft[0]", "block_table_expanded", lambda t: t[::-1]),
    at("context-windows-end-at-their-token", APART_SPARSE, 0, "draft[0]", "fullkv_owners", put(0, [-1, -1])),
    at("cache-layout-does-not-matter", APART, 2, "updated", "draft_kv", put(0, [0])),
    at("cache-layout-does-not-matter", MOVING, 2, "updated", "py_num_accepted_draft_tokens", put(0, 0)),
]  # fmt: skip
