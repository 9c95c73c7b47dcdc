"""Falsified traces of sparse backends: maps, tables and caches of their indexers, and what is selected."""

from __future__ import annotations

from tests.invariants.cases import EAGLE, PARD, served, sparse, started_up
from tests.invariants.mutation import Mutation, at, bump, put, set_to, swap
from tests.invariants.synthetic import edit

SPARSE, SPARSE_PARALLEL, SPARSE_STARTED = sparse(served(EAGLE)), sparse(served(PARD)), sparse(started_up(EAGLE))
SHORT = sparse(served(EAGLE), 12)
GRAPH_RUN = 2

_SPARSE = [
    # The map of the target's layout in a draft call, and what follows from it: slots of the wrong row and position.
    set_to("req-idx-matches-layout", SPARSE, 1, "draft[1]", "req_idx_per_token", [0, 0]),
    set_to("req-idx-matches-layout", SPARSE_STARTED, 1, "entered", "req_idx_per_token", [0, 1] * 4, GRAPH_RUN),
    at("req-idx-matches-layout", SPARSE, 2, "prepared", "req_idx_per_token", lambda rows: rows[:-1]),
    at("slots-in-own-pages", SPARSE, 1, "draft[1]", "slot_owners", lambda owners: [owners[0], [0, 8]]),
    at("slots-in-own-pages", SPARSE_PARALLEL, 2, "draft[0]", "slot_owners", put(3, [-1, -1])),
    at("slots-in-own-pages", SPARSE_STARTED, 3, "entered", "slot_owners", swap),
    at("slots-in-own-pages", SPARSE, 2, "prepared", "slot_mapping_fp8", lambda slots: [slots[1], *slots[1:]]),
    at("gen-indptr-consistent", SPARSE, 1, "draft[1]", "gen_kv_indptr", bump(1, by=3)),
    at("gen-indptr-consistent", SPARSE, 1, "draft[0]", "gen_cached_token_indptr", bump(1)),
    at("gen-indptr-consistent", SPARSE_PARALLEL, 2, "draft[0]", "gen_kv_indptr", bump(2, by=-2)),
    at("gen-kv-lens-in-every-column", SPARSE, 1, "draft[2]", "kv_lens_cuda_2d", put(0, [9, 9, 9, 8])),
    at("gen-kv-lens-in-every-column", SPARSE, 2, "prepared", "kv_lens_cuda_2d", lambda lens: [n[:1] for n in lens]),
    at("sparse-tables-name-owned-pages", SPARSE, 2, "prepared", "block_table", swap),
    at("sparse-tables-name-owned-pages", SPARSE, 2, "draft[1]", "indexer_k_cache_block_offsets", put(1, [0, 0])),
    at("indexer-keys-equal-cache", SPARSE, 2, "updated", "draft_indexer_kv", put(1, [0])),
    at("indexer-keys-equal-cache", SPARSE_PARALLEL, 2, "updated", "target_indexer_kv", lambda kv: {0: kv[1], 1: kv[0]}),
    at("slots-in-own-pages", SPARSE, 2, "draft[1]", "scale_owners", put(0, [-1, -1])),
    set_to("sparse-maps-equal-reference", SPARSE, 1, "draft[1]", "max_gen_seq_len", 4),
    set_to("sparse-maps-equal-reference", SPARSE, 1, "draft[2]", "req_idx_per_token", [0, 0]),
    at("sparse-maps-equal-reference", SPARSE, 2, "prepared", "slot_owners", swap),
]

_SELECTION = [
    # A flag that stays set: rows of 3 and 16 tokens, of which 12 are selected.
    Mutation(
        "skipped-rows-fit-the-selection",
        SHORT,
        lambda trace: edit(trace, 5, "draft[1]", "skip_indexer_for_gen_reqs", lambda _: True),
        5,
        "draft[1]",
        "kv_lens_cuda",
    ),
    at("skipped-rows-see-all-of-theirs", SHORT, 1, "draft[2]", "topk_indices_buffer", lambda rows: [rows[1], rows[0]]),
    at("skipped-rows-see-all-of-theirs", SHORT, 0, "prepared", "topk_indices_buffer", put(1, [0])),
    at("skipped-rows-see-all-of-theirs", SPARSE, 2, "entered", "topk_indices_buffer", put(1, [0, 1])),
    at("expanded-rows-follow-their-generation", SPARSE, 2, "prepared", "kv_lens_expanded_cuda", bump(3)),
    at("expanded-rows-follow-their-generation", SPARSE, 2, "entered", "block_table_expanded", put(3, [0, 0, 0])),
    at("context-windows-end-at-their-token", SPARSE, 1, "prepared", "cu_seqlen_ks", bump(0, by=-1)),
    at("context-windows-end-at-their-token", SPARSE, 1, "prepared", "cu_seqlen_ke", bump(1)),
    at("context-windows-end-at-their-token", SPARSE, 0, "prepared", "ctx_kv_indptr", bump(2)),
    at("context-windows-end-at-their-token", SPARSE, 1, "prepared", "ctx_cached_token_indptr", bump(1)),
    at("context-windows-end-at-their-token", SPARSE, 0, "prepared", "fullkv_owners", put(6, [-1, -1])),
    set_to("selection-equals-reference", SHORT, 1, "entered", "skip_indexer_for_ctx_reqs", False),
    at("selection-equals-reference", SHORT, 1, "draft[2]", "topk_indices_buffer", put(0, None)),
    at("selection-equals-reference", SPARSE, 1, "draft[1]", "kv_lens_expanded_cuda", bump(5)),
    at("selection-equals-reference", SPARSE, 1, "prepared", "fullkv_owners", put(0, [1, 0])),
]
"""Rows that select everything, rows of several tokens, windows of contexts."""

MUTATIONS = [*_SPARSE, *_SELECTION]
