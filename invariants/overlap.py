"""The overlap scheduler: a step is prepared while the one before runs, and the host learns late what that came to.

The host counts all rows of the step in flight as accepted; the device takes back what was not, before the target
reads lengths and positions. Copies to the device are in flight as well, so that what they read must stay as it is.
"""

from __future__ import annotations

from typing import Final

from invariants.case import Row, StepCase
from invariants.check import Check
from invariants.kv_lens import OFFSETS_OF_LENGTHS, corrected
from invariants.registry import REFERENCE, invariant

_ROWS: Final = "previous_batch_indices"
_OFFSETS_OF_POSITIONS: Final = "previous_pos_id_offsets_cuda"
_CACHED: Final = "_cached_token_lens"
_CORRECTIONS: Final = (_ROWS, OFFSETS_OF_LENGTHS, _OFFSETS_OF_POSITIONS)
_PER_REQUEST: Final = (
    "emitted",
    "py_rewind_len",
    "py_num_accepted_draft_tokens",
    "kv_tokens",
    "kv_blocks",
    "target_kv",
)


@invariant(
    "corrections-follow-last-step",
    reads=(*_CORRECTIONS, "new_tokens_lens"),
    museum=("TRT-24", "TRT-37", "TRT-51", "VLL-03"),
    predicates=("P6", "P10"),
)
def corrections_follow_last_step(step: StepCase, check: Check) -> None:
    """Lengths are corrected by what the request's row of the step in flight accepted, less the rows that it fed.

    ``previous_kv_lens_offsets_cuda = new_tokens_lens - rows``, positions go up by ``new_tokens_lens``, whatever
    stands between in the batch; a request without a row in that step, or a dummy, is not corrected.
    """
    moment = step.prepared
    if moment is None or not all(field in moment.seen for field in _CORRECTIONS):
        return
    generations = step.rows[step.num_contexts :]
    rows = [row.flying for row in generations]
    check.equal(
        moment, _ROWS, [-1 if r is None else r.index for r in rows], moment.seen[_ROWS], "rows of the last step"
    )
    accepted = [_accepted(row) for row in rows]
    known = [count for count in accepted if count is not None]
    if len(known) < len(accepted):
        return
    lengths = [count - _supposed(row) if row is not None else 0 for row, count in zip(rows, known, strict=True)]
    positions = [count for count, row in zip(known, generations, strict=True) for _ in range(row.query)]
    for field, expected in ((OFFSETS_OF_LENGTHS, lengths), (_OFFSETS_OF_POSITIONS, positions)):
        check.equal(moment, field, expected, moment.seen[field], f"the last step accepted {known}")


def _supposed(row: Row) -> int:
    """Tokens that the host takes a row for: all that it feeds, a prompt that ends a generation of full width."""
    return row.step.width + 1 if row.is_context else row.query


def _accepted(row: Row | None) -> int | None:
    """Tokens that a row accepted, 0 without one, None if it was not observed."""
    if row is None:
        return 0
    restored = row.step.returned
    counts: list[int] = restored.seen.get("new_tokens_lens", []) if restored is not None else []
    return counts[row.index] if row.index < len(counts) else None


@invariant(
    "corrected-lengths-are-committed-plus-fed",
    reads=("kv_lens_cuda", _CACHED, OFFSETS_OF_LENGTHS),
    museum=("TRT-24", "TRT-30", "TRT-34", "TRT-37", "VLL-03"),
    predicates=("P6",),
)
def corrected_lengths_are_committed_plus_fed(step: StepCase, check: Check) -> None:
    """Once corrected, ``kv_lens_cuda`` counts the committed tokens and those that the row feeds; it has not grown.

    What the host supposes is a bound: kernels and pages that go by it reach far enough. Metadata that is told how much
    is cached instead, ``_cached_token_lens``, is corrected by the same offsets.
    """
    moment, lengths = step.prepared, corrected(step)
    if moment is not None and {_CACHED, OFFSETS_OF_LENGTHS} <= moment.seen.keys():
        offsets = [0] * step.num_contexts + moment.seen[OFFSETS_OF_LENGTHS]
        cached = [past + offset for past, offset in zip(moment.seen[_CACHED], offsets, strict=False)]
        check.equal(moment, _CACHED, [row.past for row in step.rows], cached, "committed tokens")
    if moment is None or lengths is None or "kv_lens_cuda" not in moment.seen:
        return
    expected = [row.past + row.query for row in step.rows]
    check.equal(
        moment,
        "kv_lens_cuda",
        expected,
        lengths,
        "committed tokens and those that are fed",
    )
    seen = moment.seen["kv_lens_cuda"]
    bounded = all(map(int.__ge__, seen, lengths))
    check.that(bounded, moment, "kv_lens_cuda", lengths, seen, f"the host supposes {seen}, less than {lengths}")


@invariant(
    "positions-are-corrected",
    reads=("position_ids", _OFFSETS_OF_POSITIONS, "num_ctx_tokens"),
    museum=("TRT-24", "TRT-30"),
    predicates=("P6",),
)
def positions_are_corrected(step: StepCase, check: Check) -> None:
    """Under the overlap scheduler the target reads positions that are those of the host and what was accepted.

    A graph corrects them inside; elsewhere it is done when the forward starts. Positions that are not, repeat.
    """
    prepared = step.prepared.seen if step.prepared is not None else {}
    if not {"position_ids", _OFFSETS_OF_POSITIONS, "num_ctx_tokens"} <= prepared.keys():
        return
    supposed = prepared["position_ids"]
    offsets = [0] * prepared["num_ctx_tokens"] + prepared[_OFFSETS_OF_POSITIONS]
    positions = [position + offset for position, offset in zip(supposed, offsets, strict=False)]
    for run in step.runs:
        for moment, expected in (
            (run.entered, supposed if run.phase == "replay" else positions),
            (run.restored, positions),
        ):
            if moment is not None and "position_ids" in moment.seen:
                check.equal(
                    moment, "position_ids", expected, moment.seen["position_ids"], "those of prepare, corrected"
                )


@invariant("ended-requests-are-left-alone", reads=_PER_REQUEST, museum=("TRT-35",), predicates=("P9",))
def ended_requests_are_left_alone(step: StepCase, check: Check) -> None:
    """A request that ended while a row of it was in flight gets nothing from that row, and nothing is rewound.

    PR #9693: the rewind came for a sequence that had been removed.
    """
    moment = step.updated
    wasted = [row.request for row in step.rows if row.wasted]
    if moment is None or not wasted:
        return
    for field in _PER_REQUEST:
        if field in moment.seen:
            shown = [request for request in wasted if request in moment.seen[field]]
            check.that(not shown, moment, field, [], shown, f"requests {shown} had ended before")


@invariant("failure-ends-what-is-in-flight", reads=("emitted",), museum=("TRT-35",), predicates=("P9",))
def failure_ends_what_is_in_flight(step: StepCase, check: Check) -> None:
    """A step that fails ends the requests of the one in flight, too, whose results are not given out any more."""
    if step.actual.outcome == "ok" or step.flying is None:
        return
    updated = step.flying.updated
    check.run(updated is None, step.flying.index, "emitted", None, "updated", "its results were taken after all")


@invariant(
    "copies-are-not-overtaken", reads=("racing_copies",), museum=("TRT-90", "TRT-91", "TRT-93"), predicates=("P7",)
)
def copies_are_not_overtaken(step: StepCase, check: Check) -> None:
    """No host buffer is written while a copy to the device may still read it.

    PR #15546: a copy reads its source when it runs, not when it is enqueued; only the results of a later point of the
    stream tell that it has. A step in flight has told nothing.
    """
    for moment in step.moments:
        if "racing_copies" in moment.seen:
            names = moment.seen["racing_copies"]
            check.equal(moment, "racing_copies", [], names, "the copy may not have run yet")


@invariant(
    "overlap-equals-reference",
    reads=(*_CORRECTIONS, "position_ids"),
    museum=("TRT-24", "TRT-30", "TRT-37", "VLL-03"),
    kind=REFERENCE,
    predicates=("P6",),
)
def overlap_equals_reference(step: StepCase, check: Check) -> None:
    """Which row of the step in flight a row continues, what is corrected and its positions are the reference's."""
    if step.prepared is not None:
        check.said(step.prepared, _CORRECTIONS)
    for run in step.runs:
        for moment in (run.entered, run.restored):
            if moment is not None:
                check.said(moment, ("position_ids",))
