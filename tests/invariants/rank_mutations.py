"""Falsified traces of one rank among three: what it is told, what its draft calls go by, what all run together."""

from __future__ import annotations

from typing import Any

from tests.invariants.cases import DFLASH, DRAFT_TARGET, EAGLE, MTP_EAGLE, MTP_TREE, ranked, replicated, served
from tests.invariants.mutation import Mutation, at, bump, drop, set_to

RANKED, EXPERTS, OWN_RANKED = ranked(EAGLE), ranked(MTP_EAGLE), ranked(DFLASH)
REPLICATED = replicated(served(EAGLE))
TARGET_RANKED, TREE_RANKED = ranked(DRAFT_TARGET), ranked(MTP_TREE)


def _without(name: str) -> Any:
    """Collectives of one name left out."""
    return lambda made: [entry for entry in made if entry[0] != name]


MUTATIONS: list[Mutation] = [
    # The counts of the step before; an idle rank that is left out; a graph that the others do not pad.
    set_to("rank-counts-follow-batches", RANKED, 2, "prepared", "all_rank_num_tokens", [8, 9, 32]),
    at("rank-counts-follow-batches", RANKED, 4, "prepared", "all_rank_num_seqs", lambda _: [1, 0, 1]),
    at("rank-counts-follow-batches", RANKED, 4, "prepared", "all_rank_num_gens", bump(2, by=-1)),
    at("rank-counts-follow-batches", RANKED, 3, "entered", "all_rank_num_tokens", bump(2, by=-8)),
    set_to("rank-counts-follow-batches", RANKED, 2, "prepared", "num_tokens", 9),
    set_to("rank-counts-follow-batches", RANKED, 2, "prepared", "subseq_all_rank_num_tokens", [4, 8, 8]),
    # Exchanged before the speculative metadata was prepared (PR #18629).
    set_to("rank-counts-follow-batches", RANKED, 2, "prepared", "spec_num_tokens", 8),
    at("rank-counts-follow-batches", RANKED, 2, "prepared", "spec_all_rank_num_tokens", drop),
    set_to("rank-counts-equal-reference", RANKED, 2, "prepared", "spec_all_rank_num_tokens", [4, 8, 8]),
    set_to("rank-counts-equal-reference", TARGET_RANKED, 2, "draft[1]", "all_rank_num_tokens", [4, 8, 8]),
    set_to("rank-counts-equal-reference", RANKED, 2, "draft[1]", "all_rank_num_tokens", [1, 2, 2]),
    # The first list in every call, the second one in the first, and one token for each of several nodes.
    set_to("draft-calls-go-by-their-own-counts", EXPERTS, 2, "draft[1]", "draft_all_rank_num_tokens", [4, 8, 8]),
    set_to("draft-calls-go-by-their-own-counts", EXPERTS, 2, "draft[0]", "draft_all_rank_num_tokens", [1, 2, 2]),
    set_to("draft-calls-go-by-their-own-counts", TREE_RANKED, 2, "draft[2]", "draft_all_rank_num_tokens", [1, 2, 2]),
    # A draft model that keeps what it installed, when it succeeds and in the next step.
    set_to("restored-layout", RANKED, 2, "restored", "all_rank_num_tokens", [1, 2, 2]),
    at("collectives-equal-reference", EXPERTS, 1, "updated", "collectives", _without("draft_model.moe")),
    at("collectives-equal-reference", RANKED, 4, "updated", "collectives", _without("target_model.moe")),
    at("collectives-equal-reference", OWN_RANKED, 0, "updated", "collectives", lambda made: made[:-1]),
    at(
        "ranks-run-the-same-collectives",
        RANKED,
        1,
        "updated",
        "collectives",
        _without("spec_metadata.all_rank_num_gens"),
    ),
    at("ranks-run-the-same-collectives", EXPERTS, 2, "updated", "collectives", lambda made: made[::-1]),
    set_to("ranks-run-the-same-collectives", RANKED, 3, "updated", "graph_key", None),
    set_to("collectives-equal-reference", RANKED, 3, "updated", "graph_key", [2, 3, 7]),
    at("ranks-of-a-replica-agree", REPLICATED, 2, "restored", "next_draft_tokens", lambda rows: [rows[1], rows[0]]),
    at("ranks-of-a-replica-agree", REPLICATED, 1, "prepared", "kv_lens_cuda", bump(1, by=-2)),
    at("pipeline-ranks-prepare-the-same", served(EAGLE), 2, "prepared", "position_ids", bump(0)),
    at("pipeline-ranks-prepare-the-same", REPLICATED, 1, "updated", "py_rewind_len", bump(0)),
    at("padded-equals-unpadded", RANKED, 3, "updated", "draft_kv", lambda kv: {**kv, 1: [0]}),
    at("padded-equals-unpadded", RANKED, 4, "updated", "free_blocks", lambda pages: pages - 1),
    at("other-ranks-do-not-matter", RANKED, 2, "updated", "emitted", lambda e: {0: e[1], 1: e[0]}),
    at("other-ranks-do-not-matter", RANKED, 3, "updated", "draft_kv", lambda kv: {**kv, 1: [0]}),
]
