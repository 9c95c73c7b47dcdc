"""A drafter with a context of its own: it grows by what is committed, and only its own count says how far it reaches.

DFlash and DSpark keep a column for each cached token of a request and query them with one block of rows. Columns and
count lie outside the KV cache and are no field of the metadata, so nothing but the worker itself puts them right.
Dummies share a scratch slot, which may hold anything.
"""

from __future__ import annotations

from itertools import chain

from invariants.case import Run, StepCase
from invariants.check import Check
from invariants.kv_lens import OFFSETS_OF_LENGTHS, corrected
from invariants.registry import invariant
from scenarios.tracer import term

_ACCEPTED = ("num_accepted_tokens", "new_tokens_lens")


def _cached(step: StepCase) -> list[int] | None:
    """Cached tokens of each generation as ``prepare`` found them; None with dummies or if not observed."""
    seen, kv_lens = step.prepared.seen if step.prepared is not None else {}, corrected(step)
    if step.has_dummies or kv_lens is None or "_seq_lens" not in seen:
        return None
    rows = [*zip(kv_lens, seen["_seq_lens"])][step.num_contexts :]
    return [kv - query for kv, query in rows]


def _committed(step: StepCase, run: Run) -> list[int] | None:
    """Cached tokens of each generation once a forward has accepted its own; None where that is not known."""
    cached = _cached(step)
    if cached is None or run.accepted is None:
        return None
    return [past + count for past, count in zip(cached, run.accepted[step.num_contexts :])]


@invariant(
    "ctx-len-counts-committed",
    reads=("ctx_len", "kv_lens_cuda", OFFSETS_OF_LENGTHS, "_seq_lens", *_ACCEPTED),
    museum=("TRT-02", "TRT-70"),
    predicates=("P4",),
)
def ctx_len_counts_committed(step: StepCase, check: Check) -> None:
    """A drafter's own context has a column for each cached token before a forward, and for each accepted one after it.

    Also without drafts, and for a request that a batch left out: columns that are missing shift all later positions.
    """
    cached = _cached(step)
    for run in step.runs:
        for moment, expected in ((run.entered, cached), (run.restored, _committed(step, run))):
            if moment is not None and expected is not None and "ctx_len" in moment.seen:
                check.equal(moment, "ctx_len", expected, moment.seen["ctx_len"], "so many tokens are cached")


@invariant("ctx-len-rolled-back", reads=("ctx_len",), museum=("TRT-02",), predicates=("P2", "P4"))
def ctx_len_rolled_back(step: StepCase, check: Check) -> None:
    """A forward that fails, and one that warms up a graph, leaves the count of columns as it found it.

    PR #16382: it is advanced while the inputs of the drafter are prepared. A failure after the forward finds it
    advanced rightly; while a graph is captured or replayed nothing is rolled back, as no failure is survived there.
    """
    for run in step.runs:
        if run.phase == "graph_warmup" and run.entered is not None and run.restored is not None:
            check.kept(run.restored, run.entered, ("ctx_len",))
    if step.failed is None or not step.runs:
        return
    last = step.runs[-1]
    since = last.entered if last.restored is None and last.phase in ("eager", "graph_warmup") else last.restored
    if since is not None:
        check.kept(step.failed, since, ("ctx_len",))


@invariant(
    "draft-block-follows-context",
    reads=("num_ctx_per_req", "position_ids", "kv_lens_cuda", OFFSETS_OF_LENGTHS, "_seq_lens", *_ACCEPTED),
    museum=("TRT-02", "TRT-70"),
    predicates=("P4",),
)
def draft_block_follows_context(step: StepCase, check: Check) -> None:
    """The draft call reads the columns of all committed tokens, and its queries stand right behind them."""
    for run in step.runs:
        committed = _committed(step, run)
        for moment in run.drafts.values():
            columns = moment.seen.get("num_ctx_per_req")
            if columns is None or committed is None:
                continue
            check.equal(moment, "num_ctx_per_req", committed, columns, "so many tokens are cached by now")
            if "position_ids" in moment.seen and columns:
                positions = moment.seen["position_ids"]
                width = len(positions) // len(columns)
                expected = list(chain.from_iterable(range(count, count + width) for count in columns))
                check.equal(moment, "position_ids", expected, positions, f"num_ctx_per_req is {columns}")


@invariant("draft-context-equals-cache", reads=("draft_context", "target_kv"), museum=("TRT-70",), predicates=("P4",))
def draft_context_equals_cache(step: StepCase, check: Check) -> None:
    """A drafter's own context has the columns of the request's cached tokens, each at its position, and no others."""
    moment = step.updated
    if moment is None or not {"draft_context", "target_kv"} <= moment.seen.keys() or not step.active:
        return
    slots = moment.seen["target_kv"].items()
    expected = {request: [[n, term(n, slot)] for n, slot in enumerate(held)] for request, held in slots}
    check.equal(moment, "draft_context", expected, moment.seen["draft_context"], "target_kv holds these tokens")
