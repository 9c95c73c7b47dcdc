"""Falsified traces of guided decoding and of relaxed acceptance."""

from __future__ import annotations

from tests.invariants.cases import EAGLE, guided, relaxed
from tests.invariants.mutation import Mutation, at, put, set_to, swap

GUIDED, RELAXED = guided(EAGLE), relaxed(EAGLE)
GRAPH_RUN = 2
"""The run of the capture itself: two warm-up runs come before."""

_GUIDED = [
    # A matcher that keeps what was rejected, and what was drafted; one that missed a token or read another one's; one
    # that dummies move; one that follows the first chunk, lives on after its request or a failure, or ends too early.
    at("matchers-follow-tokens", GUIDED, 3, "restored", "matcher_rows", lambda rows: [[rows[0][0] + 2, 5], rows[1]]),
    at("matchers-follow-tokens", GUIDED, 3, "draft[0]", "matcher_rows", lambda rows: [[1, 5], rows[1]]),
    at("matchers-follow-tokens", GUIDED, 3, "draft[2]", "matcher_rows", swap),
    at("matchers-follow-tokens", GUIDED, 4, "entered", "matcher_rows", swap),
    at("matchers-follow-tokens", GUIDED, 3, "verified", "matcher_rows", lambda rows: [[rows[0][0], 5], rows[1]]),
    set_to("matchers-follow-tokens", GUIDED, 0, "entered", "matcher_rows", [[0, 0], None], GRAPH_RUN),
    at("matchers-follow-tokens", GUIDED, 1, "verified", "matcher_rows", lambda rows: [rows[0], [0, 0]]),
    at("matchers-follow-tokens", GUIDED, 5, "updated", "matchers", put(0, [9, 9])),
    at("matchers-follow-tokens", GUIDED, 4, "updated", "matchers", lambda held: {1: held[1]}),
    set_to("matchers-follow-tokens", GUIDED, 6, "failed", "matchers", {1: [5, 5]}),
    at("matchers-equal-reference", GUIDED, 3, "restored", "matcher_rows", swap),
    at("matchers-equal-reference", GUIDED, 4, "updated", "matchers", put(1, [0, 0])),
    at("output-lossless", GUIDED, 4, "updated", "emitted", lambda e: {**e, 1: [*e[1][:-1], e[1][-1] % 1022 + 1]}),
]

_RELAXED = [
    # A delta of the request that had the slot before, one that the middle of a prompt sets, one that is lost where
    # nothing is drafted, one that stays in a slot.
    at("relaxed-delta-belongs-to-thinking", RELAXED, 5, "updated", "relaxed_delta", put(2, 0.5)),
    at("relaxed-delta-belongs-to-thinking", RELAXED, 1, "updated", "relaxed_delta", put(1, 0.5)),
    at("relaxed-delta-belongs-to-thinking", RELAXED, 2, "updated", "relaxed_delta", put(1, 0)),
    set_to("relaxed-delta-belongs-to-thinking", RELAXED, 5, "updated", "relaxed_delta_left", [0.5]),
    set_to("relaxed-delta-belongs-to-thinking", RELAXED, 6, "failed", "relaxed_delta_left", [0.5]),
    set_to("relaxed-delta-belongs-to-thinking", RELAXED, 0, "updated", "relaxed_delta_left", [0.5]),
    at("acceptance-follows-agreement", RELAXED, 4, "restored", "new_tokens_lens", lambda lens: [lens[0], 2]),
    at("accepted-drafts-lie-on-a-path", RELAXED, 3, "verified", "accepted_tokens", lambda r: [[*r[0], 3], r[1]]),
    at("output-lossless", RELAXED, 4, "updated", "emitted", lambda e: {**e, 1: [*e[1][:-1], e[1][-1] % 1022 + 1]}),
]

JUDGED_MUTATIONS: list[Mutation] = [*_GUIDED, *_RELAXED]
