"""Falsified traces of generations that verify different numbers of drafts."""

from __future__ import annotations

from tests.invariants.cases import DRAFT_TARGET, EAGLE, MTP_EAGLE, SA, hybrid, ragged, separate, sparse
from tests.invariants.mutation import at, bump, put, set_to, swap

# Steps 2 and 3 are replayed; widths are 2, 3 at capture, then 3, 2 and 4, 1.
LINEAR, OVERLAPPED, HYBRID = ragged(EAGLE), ragged(DRAFT_TARGET, overlap=True), hybrid(ragged(MTP_EAGLE))
SPARSE, IN_FLIGHT = separate(sparse(ragged(EAGLE))), sparse(ragged(MTP_EAGLE, overlap=True))
SCENARIOS = [LINEAR, OVERLAPPED, HYBRID, SPARSE, IN_FLIGHT, ragged(SA)]

RAGGED_MUTATIONS = [
    # Of the step before, of the capture, of the host alone, and those of the widest layout.
    at("widths-agree-at-launch", LINEAR, 3, "prepared", "ragged_verify_lens", lambda _: [3, 2]),
    at("widths-agree-at-launch", LINEAR, 2, "entered", "gen_token_repeats_cuda", swap),
    at("widths-agree-at-launch", LINEAR, 3, "prepared", "_seq_lens_cuda", swap),
    at("widths-agree-at-launch", OVERLAPPED, 5, "draft[0]", "_seq_lens", bump(0, by=-1)),
    set_to("widths-agree-at-launch", LINEAR, 2, "entered", "spec_decoding_generation_lengths", [4, 4]),
    # A length of the whole row in each of its rows, lengths of the host where the row's is corrected, rows of others.
    set_to("row-lengths-count-down", SPARSE, 2, "prepared", "row_kv_lens_cuda", [8, 8, 8, 6, 6]),
    at("row-lengths-count-down", IN_FLIGHT, 5, "entered", "row_kv_lens_cuda", lambda lens: [n + 3 for n in lens]),
    set_to("row-lengths-count-down", SPARSE, 3, "entered", "row_req_idx_cuda", [0, 0, 0, 1, 1]),
    at("row-lengths-count-down", SPARSE, 5, "draft[0]", "row_req_idx_cuda", lambda rows: rows[:-1]),
    set_to("verify-widths-equal-reference", LINEAR, 3, "prepared", "gen_token_repeats_cuda", [3, 2]),
    at("verify-widths-equal-reference", IN_FLIGHT, 3, "entered", "row_kv_lens_cuda", bump(4)),
    at("verify-widths-equal-reference", SPARSE, 5, "draft[0]", "row_req_idx_cuda", lambda rows: rows[::-1]),
    at("verify-widths-do-not-matter", OVERLAPPED, 3, "updated", "emitted", lambda text: {**text, 1: [7, *text[1][1:]]}),
    # What other invariants ask of rows, with another number of them in each.
    at("acceptance-in-range", LINEAR, 2, "restored", "new_tokens_lens", put(1, 3)),
    at("acceptance-in-range", OVERLAPPED, 3, "updated", "py_rewind_len", put(1, 0)),
    at("oracle-drafter-accepts-all", LINEAR, 2, "restored", "new_tokens_lens", put(0, 2)),
    at("drafts-carried-over", LINEAR, 3, "prepared", "draft_tokens", lambda tokens: tokens[::-1]),
    at("rows-belong-to-requests", LINEAR, 3, "prepared", "input_ids", swap),
    at("kv-lens-balanced", LINEAR, 5, "draft[1]", "kv_lens_cuda", bump(0)),
    at("kv-ledger-balanced", OVERLAPPED, 3, "updated", "kv_tokens", put(1, 17)),
    at("corrections-follow-last-step", OVERLAPPED, 3, "prepared", "previous_kv_lens_offsets_cuda", bump(0)),
    at("corrections-follow-last-step", OVERLAPPED, 3, "prepared", "previous_pos_id_offsets_cuda", bump(4)),
    at("proposals-belong-to-their-drafts", HYBRID, 5, "verified", "draft_probs", lambda rows: [rows[0][:1], rows[1]]),
]
