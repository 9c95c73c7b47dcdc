"""Guided decoding: the matcher of a request has read exactly what the logits that it masks come after."""

from __future__ import annotations

from functools import reduce

from invariants.case import Moment, Row, Run, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant
from scenarios.tracer import GRAMMAR_START, grammar_state

_ROWS, _HELD = "matcher_rows", "matchers"


def _matcher(tokens: list[int]) -> list[int]:
    """A matcher that has read ``tokens``: how many, and its state."""
    return [len(tokens), reduce(grammar_state, tokens, GRAMMAR_START)]


@invariant(
    "matchers-follow-tokens",
    reads=(_ROWS, _HELD, "emitted", "input_ids", "new_tokens", "next_draft_tokens"),
    museum=("TRT-130", "TRT-155"),
    predicates=("P8", "P10"),
)
def matchers_follow_tokens(step: StepCase, check: Check) -> None:
    """The matcher of a request has read what it has emitted but for the last token, and in between no more than is fed.

    The target's forward adds the tokens of the row, the first draft takes back those that were rejected, each draft
    call adds the token that it is fed, and in the end all that is not accepted is taken back. Between two steps a
    request has one matcher, which ends with it; a failure ends them all.
    """
    for run in step.runs:
        for moment, call in _moments(run):
            rows = [_read(step, row, run, moment, call) for row in step.rows]
            if _ROWS in moment.seen and None not in rows:
                expected = [_matcher(tokens) if tokens is not None and _has_matcher(row) else None
                            for row, tokens in zip(step.rows, rows, strict=True)]  # fmt: skip
                check.equal(moment, _ROWS, expected, moment.seen[_ROWS], "so many tokens lie before its logits")
    ledger = step.ledger
    if ledger is None or _HELD not in ledger.seen:
        return
    if ledger is step.failed:
        check.equal(ledger, _HELD, {}, ledger.seen[_HELD], "the failure has ended all requests")
    elif "emitted" in ledger.seen:
        held = {request: _matcher(tokens[:-1]) for request, tokens in ledger.seen["emitted"].items()}
        check.equal(ledger, _HELD, held, ledger.seen[_HELD], "all that is emitted but the last token")


@invariant(
    "matchers-equal-reference", reads=(_ROWS, _HELD), museum=("TRT-130", "TRT-155"), kind=REFERENCE, predicates=("P8",)
)
def matchers_equal_reference(step: StepCase, check: Check) -> None:
    """What each matcher has read is the reference's, at every sub-step that shows them."""
    for moment in step.moments:
        check.said(moment, (_ROWS, _HELD))


def _moments(run: Run) -> list[tuple[Moment, int]]:
    """Moments of a forward that show matchers, and the draft call that each is about to make, 0 before any other."""
    shown = [(run.entered, 0), (run.verified, 0), *((moment, i) for i, moment in run.drafts.items()), (run.restored, 0)]
    return [(moment, call) for moment, call in shown if moment is not None]


def _has_matcher(row: Row) -> bool:
    return row.request is not None and bool(row.accepted)


def _read(step: StepCase, row: Row, run: Run, moment: Moment, call: int) -> list[int] | None:
    """What the matcher of a row has read at a moment, none of a row without one; None where that was not observed."""
    emitted = _emitted(row)
    if emitted is None or not _has_matcher(row):
        return [] if not _has_matcher(row) else None
    if moment is run.entered:
        return emitted[:-1]
    if moment is run.restored or call:
        outputs = run.restored.seen if run.restored is not None else {}
        if not {"new_tokens", "next_draft_tokens"} <= outputs.keys():
            return None
        if row.index >= min(len(outputs["new_tokens"]), len(outputs["next_draft_tokens"])):
            return None
        tokens: list[int] = [*emitted, *outputs["new_tokens"][row.index]]
        return [*tokens, *outputs["next_draft_tokens"][row.index][: call - 1]] if call else tokens[:-1]
    if row.is_context:
        return []
    if step.prepared is None or "input_ids" not in step.prepared.seen:
        return None
    start = sum(other.query for other in step.rows[: row.index])
    return [*emitted[:-1], *step.prepared.seen["input_ids"][start : start + row.query]]


def _emitted(row: Row) -> list[int] | None:
    """What the request of a row had emitted before the step; None if that was not observed."""
    if row.request is None or row.is_context:
        return []
    before = row.before.step.updated if row.before is not None else None
    tokens: list[int] | None = before.seen.get("emitted", {}).get(row.request) if before is not None else None
    return tokens
