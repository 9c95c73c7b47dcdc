"""Verify widths: generations that feed the target different numbers of rows, which every reader must know alike.

How many rows a generation has is told to kernels in several buffers, of the host and of the device, and some of them
are made of others. A launch with two that differ takes rows of one request for another's: silently, as the sum is
right, and never in a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from invariants.case import Moment, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant
from scenarios.trace import ENTERED, PREPARED

_PER_ROW: Final = ("_seq_lens", "_seq_lens_cuda")
_PER_GENERATION: Final = ("ragged_verify_lens", "gen_token_repeats_cuda", "spec_decoding_generation_lengths")
_OWNERS: Final = "row_req_idx_cuda"
_LENGTHS: Final = "row_kv_lens_cuda"


def _launches(step: StepCase) -> Iterator[Moment]:
    """Moments at which rows of the target's layout are about to be read: by the target and by the first draft call."""
    if step.config.ragged_verify:
        yield from (m for m in step.moments if m.name in (PREPARED, ENTERED, "draft[0]"))


@invariant(
    "widths-agree-at-launch",
    reads=(*_PER_ROW, *_PER_GENERATION, "num_contexts"),
    museum=("TRT-20", "TRT-88"),
    trait="ragged_verify",
    predicates=("P7", "P10"),
)
def widths_agree_at_launch(step: StepCase, check: Check) -> None:
    """Whatever tells how many rows each generation has says what this step asked for, wherever rows are launched.

    Host and device alike, of a graph in each replay: widths of the step before, or of the capture, have the same sum.
    """
    widths = [row.query for row in step.rows[step.num_contexts :]]
    for moment in _launches(step):
        seen = moment.seen
        for field in _PER_ROW if "num_contexts" in seen else ():
            if field in seen:
                actual = seen[field][seen["num_contexts"] :]
                check.equal(moment, field, widths, actual, "rows of the generations that were asked for")
        for field in _PER_GENERATION:
            if field in seen:
                check.equal(moment, field, widths, seen[field], "rows of the generations that were asked for")


@invariant(
    "row-lengths-count-down",
    reads=(_OWNERS, _LENGTHS, "_seq_lens", "kv_lens_cuda", "num_contexts"),
    museum=("TRT-20", "TRT-37"),
    trait="ragged_verify",
    predicates=("P7",),
)
def row_lengths_count_down(step: StepCase, check: Check) -> None:
    """Each row of a generation is mapped to its request, and sees that request's length less the rows behind it.

    ``row_kv_lens_cuda[j] == kv_lens_cuda[request of j] - rows of it after j``, by the lengths that the same launch
    finds: where these are corrected on the device, so are the rows'.
    """
    for moment in _launches(step):
        seen = moment.seen
        if not {"_seq_lens", "kv_lens_cuda", "num_contexts"} <= seen.keys():
            continue
        lens = list(enumerate(zip(seen["_seq_lens"], seen["kv_lens_cuda"], strict=False)))[seen["num_contexts"] :]
        rows = [(request, kv - behind) for request, (query, kv) in lens for behind in range(query - 1, -1, -1)]
        why = f"lengths and rows of the generations are {[pair for _, pair in lens]}"
        for field, expected in ((_OWNERS, [i for i, _ in rows]), (_LENGTHS, [length for _, length in rows])):
            if field in seen:
                check.equal(moment, field, expected, seen[field], why)


@invariant(
    "verify-widths-equal-reference",
    reads=(*_PER_GENERATION[:2], _OWNERS, _LENGTHS),
    museum=("TRT-20", "TRT-37", "TRT-88"),
    kind=REFERENCE,
    trait="ragged_verify",
    predicates=("P7",),
)
def verify_widths_equal_reference(step: StepCase, check: Check) -> None:
    """At every launch the verify widths, the request of each row and the length that it sees are the reference's."""
    for moment in _launches(step):
        check.said(moment, (*_PER_GENERATION[:2], _OWNERS, _LENGTHS))
