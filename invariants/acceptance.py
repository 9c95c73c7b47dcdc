"""Acceptance: how many drafts the target agrees with, what is emitted, what is drafted next.

``num_accepted_tokens`` counts the target's own token, ``py_num_accepted_draft_tokens`` of a request does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from invariants.case import Moment, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant


def _counts(step: StepCase) -> Iterator[tuple[Moment, str, list[int]]]:
    """Every place where the accepted counts of the rows were observed."""
    for run in step.runs:
        for moment, field in ((run.verified, "num_accepted_tokens"), (run.restored, "new_tokens_lens")):
            if moment is not None and field in moment.seen:
                yield moment, field, moment.seen[field]


@invariant(
    "acceptance-in-range",
    reads=("num_accepted_tokens", "new_tokens_lens", "py_num_accepted_draft_tokens", "py_rewind_len"),
    museum=("TRT-35", "TRT-36", "TRT-73", "TRT-77"),
    predicates=("P8",),
)
def acceptance_in_range(step: StepCase, check: Check) -> None:
    """A generation accepts at most the drafts it verifies and one more, a context one token; the rest is rewound.

    ``py_rewind_len == width - py_num_accepted_draft_tokens`` with the width of that very step and row.
    """
    limits = [row.most for row in step.rows]
    for moment, field, counts in _counts(step):
        holds = len(counts) == len(limits) and all(1 <= c <= most for c, most in zip(counts, limits, strict=True))
        check.that(
            holds, moment, field, [f"1..{most}" for most in limits], counts,
            f"{field} is {counts}; its rows accept 1 token or more, at most {limits}",
        )  # fmt: skip
    updated = step.updated
    if updated is None or not {"py_num_accepted_draft_tokens", "py_rewind_len"} <= updated.seen.keys():
        return
    rewinds = updated.seen["py_rewind_len"]
    widths = {row.request: row.query - 1 for row in step.rows}
    accepted = updated.seen["py_num_accepted_draft_tokens"]
    expected = {request: widths.get(request, 0) - drafts for request, drafts in accepted.items()}
    check.equal(updated, "py_rewind_len", expected, rewinds, "drafts of the step that were not accepted")
    check.that(
        all(n >= 0 for n in rewinds.values()), updated, "py_rewind_len", "0 or more", rewinds, "a rewind is negative"
    )


@invariant(
    "acceptance-follows-agreement",
    reads=("num_accepted_tokens", "new_tokens_lens", "py_num_accepted_draft_tokens"),
    museum=("TRT-12", "TRT-26", "TRT-64", "TRT-70", "TRT-77", "TRT-80", "TRT-94", "TRT-101", "TRT-110", "SGL-11"),
    predicates=("P8",),
)
def acceptance_follows_agreement(step: StepCase, check: Check) -> None:
    """The target accepts exactly the drafts that the scenario lets agree: 1 + min(agree, drafts verified) tokens.

    Where acceptance is forced it accepts as many as that says, the target's own on top; no more than agree.
    Fewer means that drafter or target saw another cache than they should have; output stays exact, speed is lost.
    """
    expected = [1 if row.is_context else row.accepted for row in step.rows]
    sampled = [1 if row.is_context else row.sampled for row in step.rows]
    for moment, field, counts in _counts(step):
        here = sampled if moment.phase == "graph_warmup" else expected
        check.equal(moment, field, here, counts, "so many drafts agree")
    updated = step.updated
    if updated is not None and "py_num_accepted_draft_tokens" in updated.seen:
        rows = [row for row in step.rows if not row.is_context and row.request is not None and not row.wasted]
        drafts = {row.request: row.accepted - 1 for row in rows}
        field = "py_num_accepted_draft_tokens"
        check.equal(updated, field, drafts, updated.seen[field], "so many drafts agree")


@invariant(
    "oracle-drafter-accepts-all",
    reads=("num_accepted_tokens", "new_tokens_lens"),
    museum=("TRT-12", "TRT-26", "TRT-62", "TRT-64", "TRT-70", "TRT-94", "VLL-08", "VLL-22", "SGL-11"),
    predicates=("P14",),
)
def oracle_drafter_accepts_all(step: StepCase, check: Check) -> None:
    """Where each draft of a row is the target's own choice, the row accepts all that it verifies and one more.

    Batch size 1 hides most ways to lose this; a larger batch shows them.
    """
    if not step.draft_len:
        return
    rows = {row.index: row.most for row in step.rows if not row.is_context and row.accepted == row.most > 1}
    if not rows:
        return
    for moment, field, counts in _counts(step):
        actual = [counts[i] for i in rows if i < len(counts)]
        check.equal(moment, field, [*rows.values()], actual, f"all drafts of rows {[*rows]} agree")


@invariant(
    "accepted-drafts-lie-on-a-path",
    reads=("draft_tokens", "spec_decoding_packed_mask", "accepted_tokens"),
    museum=("TRT-29", "TRT-24", "TRT-77"),
    predicates=("P5", "P8"),
)
def accepted_drafts_lie_on_a_path(step: StepCase, check: Check) -> None:
    """A generation accepts drafts that follow each other from the root on, then one token that no draft goes on with.

    In a chain they are the first ones, in a tree a path. Where acceptance is forced they may end before that token.
    """
    prepared, mask = step.prepared, "spec_decoding_packed_mask"
    if prepared is None or "draft_tokens" not in prepared.seen or (step.traits.tree and mask not in prepared.seen):
        return
    drafts, contexts = prepared.seen["draft_tokens"], step.num_contexts
    starts = [*accumulate((row.query - 1 for row in step.rows[contexts:]), initial=0)]
    chain = [list(range(node + 1)) for node in range(step.draft_len + 1)]
    masks = prepared.seen[mask] if step.traits.tree else [chain] * (len(step.rows) - contexts)
    for run in step.runs:
        if run.verified is not None and "accepted_tokens" in run.verified.seen:
            rows = list(enumerate(zip(masks, run.verified.seen["accepted_tokens"][contexts:], strict=False)))
            paths = [_path(drafts[starts[i] : starts[i + 1]], nodes, tokens) for i, (nodes, tokens) in rows]
            counts = [len(tokens) for _, (_, tokens) in rows]
            if step.config.force_num_accepted_tokens:
                paths = [path[: len(tokens)] for path, (_, (_, tokens)) in zip(paths, rows, strict=True)]
            why = "drafts that follow each other, and one token"
            check.equal(run.verified, "accepted_tokens", [len(path) for path in paths], counts, why)


def _path(drafts: list[int], mask: list[list[int]], tokens: list[int]) -> list[int]:
    """Nodes from the root on, each the child whose draft is the next of ``tokens``."""
    path = [0]
    for token in tokens:
        nodes = enumerate(zip(drafts, mask[1:], strict=False), start=1)
        children = [node for node, (draft, seen) in nodes if seen[:-1] == path and draft == token]
        if not children:
            break
        path.append(children[0])
    return path


@invariant(
    "acceptance-equals-reference",
    reads=("num_accepted_tokens", "accepted_tokens", "new_tokens", "new_tokens_lens", "force_accept_counter"),
    museum=("TRT-12", "TRT-29", "TRT-77", "TRT-100", "TRT-130", "TRT-131"),
    kind=REFERENCE,
    predicates=("P8",),
)
def acceptance_equals_reference(step: StepCase, check: Check) -> None:
    """The accepted tokens, and the new tokens that the worker returns, are the reference's."""
    for run in step.runs:
        if run.verified is not None:
            check.said(run.verified, ("num_accepted_tokens", "accepted_tokens"))
        if run.restored is not None:
            check.said(run.restored, ("new_tokens_lens", "new_tokens", "force_accept_counter"))


@invariant(
    "drafts-equal-reference",
    reads=("next_draft_tokens", "next_new_tokens"),
    museum=(
        *("TRT-12", "TRT-64", "TRT-70", "TRT-80", "TRT-94", "TRT-97", "TRT-101", "TRT-102", "TRT-110", "TRT-130"),
        "VLL-02",
    ),
    kind=REFERENCE,
    predicates=("P14",),
)
def drafts_equal_reference(step: StepCase, check: Check) -> None:
    """The drafts that a step makes are the reference's."""
    for run in step.runs:
        if run.restored is not None:
            check.said(run.restored, ("next_draft_tokens", "next_new_tokens"))


@invariant(
    "new-tokens-plumbed",
    reads=(
        "num_accepted_tokens",
        "accepted_tokens",
        "new_tokens",
        "new_tokens_lens",
        "next_draft_tokens",
        "next_new_tokens",
    ),
    museum=("TRT-24", "TRT-77", "VLL-05", "VLL-06"),
    predicates=("P8", "P10"),
)
def new_tokens_plumbed(step: StepCase, check: Check) -> None:
    """The worker returns what it accepted, and as the next input the last accepted token followed by the new drafts.

    ``next_new_tokens[:, 0] == accepted_tokens[b, num_accepted_tokens[b] - 1]``, columns 1.. are
    ``next_draft_tokens``.
    """
    for run in step.runs:
        moment = run.restored
        if moment is None:
            continue
        seen = moment.seen
        accepted = run.verified.seen if run.verified is not None else {}
        for field, source in (("new_tokens_lens", "num_accepted_tokens"), ("new_tokens", "accepted_tokens")):
            if field in seen and source in accepted:
                check.equal(moment, field, accepted[source], seen[field], f"so said {source}")
        if {"new_tokens", "next_draft_tokens", "next_new_tokens"} <= seen.keys():
            rows = zip(seen["new_tokens"], seen["next_draft_tokens"], strict=False)
            expected = [[*tokens[-1:], *drafts] for tokens, drafts in rows]
            check.equal(moment, "next_new_tokens", expected, seen["next_new_tokens"], "last token, then the drafts")
