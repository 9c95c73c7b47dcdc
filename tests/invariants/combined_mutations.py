"""Falsified traces of overlap beside ranks, grammars and automata, and on further backends; of pages beside ranks."""

from __future__ import annotations

from tests.invariants.backend_mutations import of
from tests.invariants.cases import EAGLE, beside, enhanced, guided, on_backend, overlapped, overlapping, ranked, sharing
from tests.invariants.mutation import at, bump, put, set_to

RANKED, GUIDED, ENHANCED = (overlapping(made) for made in (ranked(EAGLE), guided(EAGLE), enhanced(overlapped(EAGLE))))
COMPRESSED, PAGED = (on_backend(overlapped(EAGLE), name) for name in ("DEEPSEEK_V4", "FLASHINFER"))
SHARING = beside(sharing(EAGLE))
SCENARIOS = [RANKED, GUIDED, ENHANCED, COMPRESSED, PAGED, SHARING, beside(overlapped(EAGLE))]
ROWS, LENGTHS, POSITIONS = "previous_batch_indices", "previous_kv_lens_offsets_cuda", "previous_pos_id_offsets_cuda"

COMBINED_MUTATIONS = [
    # The dummy of the replay in step 3 is that of the idle step 4, and goes on from its row there.
    at("corrections-follow-last-step", RANKED, 4, "prepared", ROWS, put(0, 2)),
    at("corrections-follow-last-step", RANKED, 4, "prepared", LENGTHS, put(0, -3)),
    at("corrections-follow-last-step", RANKED, 4, "prepared", POSITIONS, bump(0)),
    at("rank-counts-follow-batches", RANKED, 3, "prepared", "all_rank_num_tokens", bump(1, by=-4)),
    at("ranks-run-the-same-collectives", RANKED, 4, "updated", "collectives", lambda made: made[1:]),
    # The matcher of a request that is in flight has read what the host knows.
    at("matchers-follow-tokens", GUIDED, 3, "entered", "matcher_rows", put(0, [0, 0])),
    at("matchers-follow-tokens", GUIDED, 3, "updated", "matchers", put(0, [1, 1])),
    at("automaton-holds-text", ENHANCED, 3, "updated", "automaton", lambda texts: {**texts, 0: texts[0][:-1]}),
    # Tables by true lengths, cached lengths by those of the host, in the forward and before it.
    at("compressed-counts-follow-lengths", COMPRESSED, 3, "entered", "cached_token_lens", bump(0)),
    at("compressed-counts-follow-lengths", COMPRESSED, 3, "prepared", "new_comp_kv_lens", of(2, bump(0))),
    at("page-totals-add-up", PAGED, 3, "entered", "num_blocks", bump(0, by=-1)),
    at("page-arrays-match-layout", PAGED, 3, "entered", "_cached_token_lens", bump(0)),
    at("page-arrays-match-layout", PAGED, 4, "entered", "_cached_token_lens", bump(0, by=-1)),
    at("page-arrays-match-layout", PAGED, 3, "entered", "_paged_kv_last_page_len", bump(1)),
    at("corrected-lengths-are-committed-plus-fed", PAGED, 3, "prepared", "_cached_token_lens", bump(0)),
    # The whole chunk is told of a prompt whose first pages are reused.
    set_to("rank-counts-follow-batches", SHARING, 1, "prepared", "all_rank_num_tokens", [4, 4 + 10]),
]
