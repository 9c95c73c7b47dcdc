"""Falsified traces of drafters that have suffix automata beside them."""

from __future__ import annotations

from tests.invariants.cases import EAGLE, MTP, enhanced, failing, served, started_up
from tests.invariants.mutation import at, put, set_to, swap

ENHANCED, STARTED, FAILING = (enhanced(make(EAGLE)) for make in (served, started_up, failing))

MUTATIONS = [
    at("graph-buffers-stable", STARTED, 3, "entered", "identity", put("sa_draft_tokens", "grown")),
    # Step 1 has a context before its generation, whose automaton takes over; in step 2 that of row 0 does.
    at("automata-equal-reference", ENHANCED, 1, "restored", "sa_match_len", put(0, 2)),
    at("automata-equal-reference", ENHANCED, 2, "restored", "sa_draft_tokens", swap),
    at("automata-equal-reference", STARTED, 3, "restored", "sa_draft_tokens", lambda d: [d[0], [0] * 3]),
    # Left out, put into the row of a context, and done for a match that is too short.
    at("long-match-overrides-drafts", ENHANCED, 1, "restored", "next_draft_tokens", lambda d: [d[0], [473, 115, 9]]),
    at("long-match-overrides-drafts", ENHANCED, 1, "restored", "next_draft_tokens", swap),
    at("long-match-overrides-drafts", ENHANCED, 5, "restored", "next_draft_tokens", lambda d: [d[0], [267, 458]]),
    at("long-match-overrides-drafts", STARTED, 3, "restored", "next_draft_tokens", swap),
    # Not granted, kept after the end, kept after a failure, and kept by a dummy.
    set_to("automata-belong-to-requests", ENHANCED, 0, "updated", "sa_requests", [0]),
    set_to("automata-belong-to-requests", ENHANCED, 5, "updated", "sa_requests", [0, 1, 2]),
    set_to("automata-belong-to-requests", FAILING, 2, "failed", "sa_requests", [0, 1]),
    set_to("automata-belong-to-requests", STARTED, 1, "updated", "sa_requests", [-1]),
    # The first token that was said comes before those of the first generation, not with the prompt's.
    at("automaton-holds-text", ENHANCED, 0, "updated", "automaton", lambda texts: {**texts, 0: [*texts[0], 5]}),
    at("automaton-holds-text", ENHANCED, 1, "updated", "automaton", lambda t: {**t, 0: [*t[0][:5], *t[0][6:]]}),
    at("automaton-holds-text", ENHANCED, 3, "updated", "automaton", lambda texts: {**texts, 0: texts[0][:-1]}),
    at("layers-look-ahead", enhanced(served(MTP)), 2, "updated", "draft_layers_kv", lambda kv: {**kv, 1: kv[0]}),
]
