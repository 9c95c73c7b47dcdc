"""Falsified traces of recurrent states and of proposals."""

from __future__ import annotations

from tests.invariants.cases import DFLASH, EAGLE, MTP_TREE, PARD, hybrid, overlapped, served, started_up
from tests.invariants.mutation import at, bump, drop, put, set_to, swap

# Rows change places in step 3, step 4 is replayed and has a wasted row, request 1 is left out in step 5.
OVERLAPPED, TREE, STARTED = hybrid(overlapped(EAGLE)), hybrid(served(MTP_TREE)), hybrid(started_up(EAGLE))
BLOCKS, MASKS = hybrid(served(DFLASH)), hybrid(served(PARD))

ROW_MUTATIONS = [
    # Not promoted, promoted one further, and a node of the tree that nobody made.
    at("accepted-state-becomes-live", OVERLAPPED, 2, "restored", "ssm_states", bump(0)),
    at("accepted-state-becomes-live", BLOCKS, 2, "restored", "ssm_states", swap),
    at("accepted-state-becomes-live", TREE, 2, "restored", "ssm_states", bump(1)),
    at("accepted-state-becomes-live", BLOCKS, 2, "restored", "ssm_states", drop),
    at("recurrent-state-equals-cache", OVERLAPPED, 4, "updated", "recurrent_states", put(1, 5)),
    at("states-of-others-stay", OVERLAPPED, 5, "updated", "recurrent_states", put(1, 5)),
    set_to("states-are-promoted-once", OVERLAPPED, 1, "restored", "update_mamba_states", 1),
    set_to("states-are-promoted-once", OVERLAPPED, 2, "restored", "update_mamba_states", 0),
    set_to("states-are-promoted-once", STARTED, 1, "restored", "update_mamba_states", 2, run=2),
    # A dummy in a slot that is free for now, and what it left in its own.
    at("dummies-share-a-slot-of-their-own", STARTED, 1, "entered", "state_indices", put(1, 0), run=1),
    at("dummies-share-a-slot-of-their-own", STARTED, 0, "prepared", "batch_slot_ids", put(0, 7)),
    at("dummies-share-a-slot-of-their-own", STARTED, 1, "entered", "state_indices", drop, run=1),
    set_to("dummies-share-a-slot-of-their-own", STARTED, 1, "updated", "sentinel_state", 9),
    at("slots-belong-to-requests", OVERLAPPED, 3, "entered", "state_indices", swap),
    at("slots-belong-to-requests", OVERLAPPED, 3, "restored", "batch_slot_ids", put(0, 0)),
    at("slots-belong-to-requests", OVERLAPPED, 3, "prepared", "state_indices", drop),
    at("slots-belong-to-requests", OVERLAPPED, 5, "updated", "mamba_slots", put(1, 3)),
    at("slots-belong-to-requests", OVERLAPPED, 5, "updated", "seq_slots", lambda slots: {**slots, 0: 0}),
    at("recurrent-states-equal-reference", OVERLAPPED, 3, "entered", "ssm_states", swap),
    at("recurrent-states-equal-reference", TREE, 2, "verified", "intermediate_ssm_states", swap),
    at("recurrent-layers-change-nothing", OVERLAPPED, 4, "updated", "emitted", put(1, [7])),
    # By the other row's, by the draft that came after, and by what was left of a longer step.
    at("proposals-belong-to-their-drafts", OVERLAPPED, 3, "verified", "draft_probs", swap),
    at("proposals-belong-to-their-drafts", MASKS, 2, "verified", "draft_probs", lambda rows: [r[::-1] for r in rows]),
    at("proposals-belong-to-their-drafts", OVERLAPPED, 3, "verified", "draft_probs", lambda r: [[*r[0][:2], 5], r[1]]),
    at("proposals-belong-to-their-drafts", OVERLAPPED, 3, "verified", "draft_probs", drop),
    at("proposals-of-others-stay", OVERLAPPED, 5, "updated", "kept_draft_probs", put(1, [1, 2, 3])),
    set_to("rejection-sampling-takes-place", OVERLAPPED, 4, "restored", "rejection_rows", 0),
    set_to("rejection-sampling-takes-place", MASKS, 0, "restored", "rejection_rows", 2),
    at("proposals-equal-reference", OVERLAPPED, 1, "restored", "draft_probs", swap),
    at("proposals-equal-reference", MASKS, 1, "updated", "kept_draft_probs", put(1, [0, 0, 0])),
    at("rejection-sampling-accepts-the-same", OVERLAPPED, 3, "updated", "py_num_accepted_draft_tokens", put(1, 0)),
]
