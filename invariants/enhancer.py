"""A suffix automaton beside a draft model: whose drafts a generation returns, and who owns an automaton.

Upstream's ``SADraftEnhancer`` lets the model draft for all rows and replaces the drafts of some generations afterwards.
Rows of its buffers are the generations of the batch, in order, without the contexts before them.
"""

from __future__ import annotations

from typing import Final

from invariants.case import Run, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant

FOUND: Final = ("sa_match_len", "sa_draft_tokens")
"""What the automata have found for each generation."""


@invariant("automata-equal-reference", reads=FOUND, museum=("TRT-110",), kind=REFERENCE, predicates=("P10",))
def automata_equal_reference(step: StepCase, check: Check) -> None:
    """For each generation its automaton finds the match that there is, and how the text of that request goes on."""
    for run in step.runs:
        if run.restored is not None:
            check.said(run.restored, FOUND)


@invariant(
    "long-match-overrides-drafts",
    reads=(*FOUND, "next_draft_tokens", "input_ids"),
    museum=("TRT-110",),
    predicates=("P10",),
)
def long_match_overrides_drafts(step: StepCase, check: Check) -> None:
    """A generation returns all drafts of its automaton from the threshold on, and its model's own below it.

    What the model has drafted is seen where its loop is fed with it, a row per request.
    """
    for run in step.runs:
        seen = run.restored.seen if run.restored is not None else {}
        if run.restored is None or not {*FOUND, "next_draft_tokens"} <= seen.keys():
            continue
        returned = seen["next_draft_tokens"]
        expected = [list(drafts) for drafts in returned]
        rows = enumerate(zip(seen["sa_match_len"], seen["sa_draft_tokens"], strict=False), start=step.num_contexts)
        matches = dict(rows)
        for row, drafts in enumerate(expected):
            match, found = matches.get(row, (0, []))
            if match >= step.config.sa_threshold:
                drafts[: len(found)] = found
            else:
                model = _fed_back(step, run, row)
                drafts[: len(model)] = model
        why = f"sa_match_len is {seen['sa_match_len']}, sa_threshold {step.config.sa_threshold}"
        check.equal(run.restored, "next_draft_tokens", expected, returned, why)


def _fed_back(step: StepCase, run: Run, row: int) -> list[int]:
    """Drafts of the model for a row, as far as later calls of its loop are fed one token per row."""
    calls = [run.drafts[i] for i in sorted(run.drafts) if i]
    inputs = [call.seen.get("input_ids", []) for call in calls]
    return [tokens[row] for tokens in inputs] if all(len(tokens) == len(step.rows) for tokens in inputs) else []


@invariant("automata-belong-to-requests", reads=("sa_requests",), museum=("TRT-110",), predicates=("P10",))
def automata_belong_to_requests(step: StepCase, check: Check) -> None:
    """Each request owns an automaton from its first chunk until it ends, one way or another; no dummy is left with one.

    A failed step ends all of its requests, so afterwards nobody owns any.
    """
    moment = step.ledger
    if moment is not None and "sa_requests" in moment.seen:
        owners = sorted(step.held)
        check.equal(moment, "sa_requests", owners, moment.seen["sa_requests"], "requests that have started")
