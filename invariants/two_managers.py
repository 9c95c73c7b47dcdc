"""Two KV-cache managers for one request: which one is meant, and that both are told the same.

With a separate draft KV cache the metadata refers to the drafter's manager, tables and maps while drafting, and to the
target's at all other times. With host offload a manager moves pages, so that the id of a page, which its ledger and
connectors know, is not its place in the pool, which kernels are given.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from invariants.case import StepCase
from invariants.check import Check
from invariants.pools import pools, read_by
from invariants.registry import invariant
from scenarios.trace import ENTERED, FAILED, RESTORED

_REFERRED: Final = "kv_cache_block_offsets"
_DRAFTERS: Final = "draft_kv_cache_block_offsets"


@invariant(
    "manager-follows-forward", reads=("kv_cache_manager",), museum=("TRT-63", "TRT-64", "TRT-65"), predicates=("P7",)
)
def manager_follows_forward(step: StepCase, check: Check) -> None:
    """The metadata refers to the target's manager; only in draft calls to that of the drafter's own cache, if any.

    After a failure it is the target's, too. PR #11990: with the other manager in place, what is read, written and
    prepared belongs to the other cache.
    """
    for moment in step.moments:
        if "kv_cache_manager" in moment.seen:
            owner = read_by(step.config, moment).owner
            check.equal(moment, "kv_cache_manager", owner, moment.seen["kv_cache_manager"], "whose cache is at work")


@invariant(
    "tables-follow-manager", reads=(_REFERRED, _DRAFTERS), museum=("TRT-62", "TRT-63", "TRT-65"), predicates=("P7",)
)
def tables_follow_manager(step: StepCase, check: Check) -> None:
    """A draft call reads the block tables that were prepared for its cache, and both tables are left as prepared.

    A swap that stops halfway leaves the manager of one cache with the tables of the other.
    """
    prepared = step.prepared
    if prepared is None:
        return
    for moment in step.moments:
        if moment is prepared:
            continue
        source = read_by(step.config, moment).field(_REFERRED)
        sources = {_REFERRED: source} | ({_DRAFTERS: _DRAFTERS} if moment.name in (ENTERED, RESTORED, FAILED) else {})
        for field, origin in sources.items():
            if field in moment.seen and origin in prepared.seen:
                check.equal(moment, field, prepared.seen[origin], moment.seen[field], f"so {origin} was prepared")


@invariant(
    "both-managers-hold-the-same-tokens",
    reads=("kv_tokens", "draft_kv_tokens"),
    museum=("TRT-60", "TRT-66", "TRT-68"),
    predicates=("P9",),
)
def both_managers_hold_the_same_tokens(step: StepCase, check: Check) -> None:
    """After each step, and after a failure that was handled, both managers hold the same tokens for each request."""
    moment = step.ledger
    if moment is not None and "kv_tokens" in moment.seen and "draft_kv_tokens" in moment.seen:
        tokens = moment.seen["kv_tokens"]
        check.agree(moment, "draft_kv_tokens", tokens, moment.seen["draft_kv_tokens"], "kv_tokens")


@invariant(
    "kernels-get-pool-indices",
    reads=(_REFERRED, _DRAFTERS, "kv_pool_indices", "draft_kv_pool_indices"),
    museum=("TRT-62",),
    predicates=("P7",),
)
def kernels_get_pool_indices(step: StepCase, check: Check) -> None:
    """A block table holds the places of pages in the pool; with host offload these are not the ids of the pages.

    PR #13124: block ids were written into the table of a draft replay, and reached past the end of the pool.
    """
    moment = step.prepared
    if moment is None:
        return
    for pool in pools(step.config):
        field, of_indices = pool.field(_REFERRED), pool.field("kv_pool_indices")
        if field not in moment.seen:
            continue
        table = moment.seen[field]
        outside = sorted({page for page in chain.from_iterable(table) if not 0 <= page < pool.num_blocks})
        message = f"pages {outside} are outside a pool of {pool.num_blocks}"
        check.that(not outside, moment, field, [], outside, message)
        if of_indices in moment.seen:
            check.equal(moment, field, moment.seen[of_indices], table, "there the manager has these pages")


@invariant(
    "connector-knows-owned-pages", reads=("connector_block_ids", "kv_blocks"), museum=("TRT-69",), predicates=("P9",)
)
def connector_knows_owned_pages(step: StepCase, check: Check) -> None:
    """A connector has been told the pages that a request owns, by their ids, and no page that a rewind released.

    PR #16455: its list only grew.
    """
    moment = step.updated
    if moment is not None and "connector_block_ids" in moment.seen and "kv_blocks" in moment.seen:
        # Of a prompt that has been launched since, a connector may know or not.
        blocks, told = moment.seen["kv_blocks"], {*step.active, *moment.seen["connector_block_ids"]}
        blocks = {request: pages for request, pages in blocks.items() if request in told}
        check.agree(moment, "connector_block_ids", blocks, moment.seen["connector_block_ids"], "kv_blocks")


@invariant(
    "connector-saves-what-is-committed",
    reads=("connector_num_tokens", "target_kv"),
    museum=("VLL-21",),
    predicates=("P8", "P9"),
)
def connector_saves_what_is_committed(step: StepCase, check: Check) -> None:
    """A connector saves the tokens that are cached for good, not drafts that were fed and not accepted."""
    moment = step.updated
    if moment is not None and "connector_num_tokens" in moment.seen and "target_kv" in moment.seen:
        committed = {request: len(slots) for request, slots in moment.seen["target_kv"].items()}
        check.equal(moment, "connector_num_tokens", committed, moment.seen["connector_num_tokens"], "cached tokens")
