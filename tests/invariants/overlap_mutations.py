"""Falsified traces of the overlap scheduler."""

from __future__ import annotations

from scenarios import Substep, Trace
from tests.invariants.cases import EAGLE, EAGLE_TREE, failing, overlapped, overlapping, served, sparse
from tests.invariants.mutation import Mutation, at, bump, put, set_to, swap
from tests.invariants.synthetic import edit, edit_step

OVERLAPPED, FAILING, TREE = overlapped(EAGLE), overlapping(failing(EAGLE)), overlapped(EAGLE_TREE)
SPARSE = sparse(OVERLAPPED, 12)
ROWS, LENGTHS, POSITIONS = "previous_batch_indices", "previous_kv_lens_offsets_cuda", "previous_pos_id_offsets_cuda"


def _supposes_less(trace: Trace) -> Trace:
    """Step 3 supposes less to be cached than there is, and adds the rest."""
    for field in ("kv_lens_cuda", "kv_lens_runtime"):
        trace = edit(trace, 3, "prepared", field, bump(0, by=-3))
    return edit(trace, 3, "prepared", LENGTHS, bump(0, by=3))


def _corrects_nothing(trace: Trace) -> Trace:
    return edit(trace, 3, "prepared", LENGTHS, lambda _: [0, 0])


def _emits_after_all(trace: Trace) -> Trace:
    """The results of step 1 are taken though step 2 failed."""
    updated = Substep("updated", 0, "eager", {"emitted": {0: [7]}})
    return edit_step(trace, 1, substeps=(*trace.steps[1].substeps, updated))


OVERLAP_MUTATIONS = [
    # Rows that change places, one that has no row in the step in flight, and dummies.
    at("corrections-follow-last-step", OVERLAPPED, 3, "prepared", ROWS, swap),
    at("corrections-follow-last-step", OVERLAPPED, 3, "prepared", LENGTHS, swap),
    at("corrections-follow-last-step", OVERLAPPED, 6, "prepared", LENGTHS, put(1, -2)),
    at("corrections-follow-last-step", OVERLAPPED, 8, "prepared", POSITIONS, bump(0)),
    at("corrections-follow-last-step", OVERLAPPED, 0, "prepared", LENGTHS, put(0, -1)),
    at("corrections-follow-last-step", TREE, 3, "prepared", POSITIONS, bump(9)),
    # Corrected once too often or not at all, with every field in agreement, and a bound that is none.
    at("corrected-lengths-are-committed-plus-fed", OVERLAPPED, 3, "prepared", "kv_lens_cuda", bump(0)),
    Mutation("corrected-lengths-are-committed-plus-fed", OVERLAPPED, _corrects_nothing, 3, "prepared", "kv_lens_cuda"),
    Mutation("corrected-lengths-are-committed-plus-fed", OVERLAPPED, _supposes_less, 3, "prepared", "kv_lens_cuda"),
    at("corrected-lengths-are-committed-plus-fed", served(EAGLE), 1, "prepared", "kv_lens_cuda", bump(1)),
    at("positions-are-corrected", OVERLAPPED, 3, "entered", "position_ids", bump(0)),
    at("positions-are-corrected", OVERLAPPED, 4, "restored", "position_ids", bump(0, by=-1)),
    at("positions-are-corrected", OVERLAPPED, 4, "entered", "position_ids", bump(0)),
    at("ended-requests-are-left-alone", OVERLAPPED, 4, "updated", "py_rewind_len", put(0, 2)),
    at("ended-requests-are-left-alone", OVERLAPPED, 4, "updated", "kv_tokens", put(0, 2)),
    Mutation("failure-ends-what-is-in-flight", FAILING, _emits_after_all, 1, None, "emitted"),
    set_to("copies-are-not-overtaken", OVERLAPPED, 4, "restored", "racing_copies", ["kv_lens_cuda"]),
    set_to("copies-are-not-overtaken", served(EAGLE), 1, "updated", "racing_copies", ["block_table"]),
    set_to("copies-are-not-overtaken", FAILING, 2, "failed", "racing_copies", ["prompt_lens_cuda"]),
    at("overlap-equals-reference", OVERLAPPED, 3, "prepared", ROWS, swap),
    at("overlap-equals-reference", OVERLAPPED, 4, "restored", "position_ids", bump(0)),
    at("overlap-equals-no-overlap", OVERLAPPED, 4, "updated", "emitted", put(1, [7])),
    at("overlap-equals-no-overlap", OVERLAPPED, 8, "updated", "draft_kv", put(2, [0])),
    at("stalled-copies-change-nothing", OVERLAPPED, 3, "prepared", "kv_lens_cuda", bump(0)),
    at("stalled-copies-change-nothing", OVERLAPPED, 6, "updated", "emitted", put(2, [7])),
    # What others say when lengths and ledgers lag.
    at("kv-lens-balanced", OVERLAPPED, 3, "verified", "kv_lens_cuda", bump(0)),
    at("warmup-fixed-point", OVERLAPPED, 4, "entered", "kv_lens_cuda", bump(0, by=-1)),
    at("kv-ledger-balanced", OVERLAPPED, 3, "updated", "kv_tokens", bump(0)),
    at("kv-ledger-balanced", OVERLAPPED, 5, "updated", "kv_tokens", bump(1)),
    at("kv-ledger-balanced", OVERLAPPED, 6, "updated", "free_blocks", lambda free: free - 1),
    at("tables-name-owned-pages", OVERLAPPED, 3, "prepared", "kv_cache_block_offsets", swap),
    at("slots-belong-to-requests", OVERLAPPED, 4, "updated", "spec_slots", put(0, 0)),
    at("sparse-maps-equal-reference", SPARSE, 3, "prepared", "slot_owners", put(0, [0, 0])),
]
