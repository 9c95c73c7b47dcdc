"""Rows: whose tokens lie where. Row r of every tensor of one launch belongs to the same request."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

from invariants.case import Row, StepCase
from invariants.check import Check
from invariants.lifecycle import LAYOUT
from invariants.registry import REFERENCE, invariant
from scenarios import Request
from scenarios.tracer import DUMMY_TOKEN, PAD_TOKEN

_DRAFT_INPUTS: Final = ("input_ids", "position_ids", "hidden_states", "num_ctx_per_req", "draft_all_rank_num_tokens")


@lru_cache(maxsize=1024)
def prompt(seed: int, request: Request) -> tuple[int, ...]:
    """The prompt of a request."""
    return tuple(request.prompt(seed))


@invariant(
    "layout-equals-reference",
    reads=(
        *LAYOUT,
        "kv_cache_manager",
        "prompt_lens_cpu",
        "prompt_lens_cuda",
        "runtime_draft_len",
        "runtime_tokens_per_gen_step",
    ),
    museum=("TRT-03", "TRT-06", "TRT-23", "TRT-75", "VLL-02"),
    kind=REFERENCE,
    predicates=("P1", "P3"),
)
def layout_equals_reference(step: StepCase, check: Check) -> None:
    """At every sub-step of a forward the batch layout is the reference's: lengths, counts, types, draft length."""
    for moment in step.moments:
        if moment is not step.failed:
            check.said(moment, (*LAYOUT, "kv_cache_manager"))
    if step.prepared is not None:
        check.said(
            step.prepared, ("prompt_lens_cpu", "prompt_lens_cuda", "runtime_draft_len", "runtime_tokens_per_gen_step")
        )


@invariant(
    "speculation-flag-equals-reference",
    reads=("use_spec_decoding",),
    museum=("TRT-06", "TRT-73"),
    kind=REFERENCE,
    predicates=("P2", "P5"),
)
def speculation_flag_equals_reference(step: StepCase, check: Check) -> None:
    """``use_spec_decoding`` is off in the later draft calls of a linear drafter and on everywhere else.

    A drafter of trees turns it off for the first call of a batch of contexts, which have none. What a failure leaves
    in it is not specified; the next ``prepare`` sets it.
    """
    for moment in step.moments:
        if moment is not step.failed:
            check.said(moment, ("use_spec_decoding",))


@invariant(
    "gather-ids-match-layout",
    reads=("gather_ids", "_seq_lens"),
    museum=("TRT-26", "VLL-18", "SGL-12"),
    predicates=("P10",),
)
def gather_ids_match_layout(step: StepCase, check: Check) -> None:
    """Logits are taken at the last row of each context and at every row of each generation."""
    moment = step.prepared
    if moment is None or "gather_ids" not in moment.seen or "_seq_lens" not in moment.seen:
        return
    ends = list(accumulate(moment.seen["_seq_lens"], initial=0))
    contexts = step.num_contexts
    last = [end - 1 for end in ends[1 : contexts + 1]]
    expected = last + list(range(ends[min(contexts, len(ends) - 1)], ends[-1]))
    check.equal(moment, "gather_ids", expected, moment.seen["gather_ids"], "so says _seq_lens")


@invariant(
    "rows-belong-to-requests",
    reads=("request_ids", "input_ids", "draft_tokens", "emitted"),
    museum=("TRT-24", "TRT-25", "TRT-29", "VLL-03", "SGL-06"),
    predicates=("P10",),
)
def rows_belong_to_requests(step: StepCase, check: Check) -> None:
    """Each row feeds its own request's tokens: its next prompt tokens, or its last emitted token and its drafts.

    Prompts are drawn per request, so a token of a neighbour is recognised.
    """
    moment = step.prepared
    if moment is None:
        return
    seen = moment.seen
    if "request_ids" in seen:
        owners = [row.request for row in step.rows]
        check.equal(moment, "request_ids", owners, seen["request_ids"], "contexts first, each in its place")
    if "input_ids" not in seen or "draft_tokens" not in seen:
        return
    expected: list[int] = []
    drafts, used = seen["draft_tokens"], 0
    for row in step.rows:
        if row.is_context:
            expected += _prompt_part(row)
            continue
        last = _last_token(row)
        if last is None:
            return
        expected += [last, *drafts[used : used + row.query - 1]]
        used += row.query - 1
    check.equal(moment, "input_ids", expected, seen["input_ids"], "prompt tokens, or the last token and the drafts")


def _prompt_part(row: Row) -> list[int]:
    if row.request is None:
        return [DUMMY_TOKEN] * row.query
    case = row.step.case
    tokens = prompt(case.config.seed, case.requests[row.request])
    return list(tokens[row.past : row.past + row.query])


def _last_token(row: Row) -> int | None:
    """The token that a generation row starts with; None if what the request emitted was not observed."""
    if row.request is None:
        return DUMMY_TOKEN
    if row.before is None or row.before.step.updated is None:
        return None
    emitted = row.before.step.updated.seen.get("emitted", {}).get(row.request)
    return emitted[-1] if emitted else None


@invariant(
    "drafts-carried-over",
    reads=("draft_tokens", "next_draft_tokens"),
    museum=("TRT-24", "TRT-73", "TRT-75", "VLL-04", "VLL-06"),
    predicates=("P8", "P10"),
)
def drafts_carried_over(step: StepCase, check: Check) -> None:
    """A generation verifies the drafts that its own last step made, cut or padded to as many as it is to verify."""
    moment = step.prepared
    if moment is None or "draft_tokens" not in moment.seen or not step.draft_len:
        return
    generations = step.rows[step.num_contexts :]
    starts = accumulate((row.query - 1 for row in generations), initial=0)
    for start, row in zip(starts, generations, strict=False):
        length = row.query - 1 if step.traits.tree else row.most - 1
        made = _drafts_made(row.before) if row.before is not None else None
        if row.before is not None and made is not None:
            expected = (made + [PAD_TOKEN] * length)[:length]
            actual = moment.seen["draft_tokens"][start : start + length]
            why = f"request {row.request} made {made} in step {row.before.step.index}"
            check.equal(moment, "draft_tokens", expected, actual, why)


def _drafts_made(row: Row) -> list[int] | None:
    """Drafts that a row returned."""
    restored = row.step.returned
    rows: Any = restored.seen.get("next_draft_tokens") if restored is not None else None
    return list(rows[row.index]) if rows is not None and row.index < len(rows) else None


@invariant(
    "inputs-equal-reference",
    reads=(
        "input_ids",
        "position_ids",
        "hidden_states",
        "num_ctx_per_req",
        "request_ids",
        "gather_ids",
        "draft_tokens",
        "draft_all_rank_num_tokens",
    ),
    museum=("TRT-21", "TRT-24", "TRT-26", "TRT-45", "TRT-94", "TRT-110", "VLL-02"),
    kind=REFERENCE,
    predicates=("P10",),
)
def inputs_equal_reference(step: StepCase, check: Check) -> None:
    """The inputs of the target forward and of each draft call are the reference's, row for row."""
    if step.prepared is not None:
        check.said(
            step.prepared,
            ("request_ids", "input_ids", "position_ids", "hidden_states", "gather_ids", "draft_tokens"),
        )
    for run in step.runs:
        for moment in run.drafts.values():
            check.said(moment, _DRAFT_INPUTS)
