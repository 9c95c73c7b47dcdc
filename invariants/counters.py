"""Counters and copies: numbers that are kept twice must agree wherever anybody can read them."""

from __future__ import annotations

from typing import Final

from invariants.case import StepCase
from invariants.check import Check
from invariants.registry import invariant

_COPIES: Final = (("_seq_lens", "_seq_lens_cuda"), ("prompt_lens_cpu", "prompt_lens_cuda"))


@invariant(
    "derived-counters-consistent",
    reads=("num_contexts", "_seq_lens", "num_generations", "num_ctx_tokens", "num_tokens"),
    museum=("TRT-03", "TRT-06", "TRT-23"),
    predicates=("P1",),
)
def derived_counters_consistent(step: StepCase, check: Check) -> None:
    """At every sub-step the counters are those of ``num_contexts`` and ``_seq_lens``.

    ``num_ctx_tokens == sum(_seq_lens[:num_contexts])``, ``num_generations == len(_seq_lens) - num_contexts``,
    ``num_tokens == sum(_seq_lens)``: what AttentionMetadata.on_update computes. While a drafter reads a context of
    its own instead, the counters stay the target's.
    """
    for moment in step.moments:
        seen = moment.seen
        if "num_contexts" not in seen or "_seq_lens" not in seen:
            continue
        contexts, lens = seen["num_contexts"], seen["_seq_lens"]
        if step.reads_own_context(moment):
            if step.prepared is None or "_seq_lens" not in step.prepared.seen:
                continue
            lens = step.prepared.seen["_seq_lens"]
        check.that(
            0 <= contexts <= len(lens), moment, "num_contexts", f"0..{len(lens)}", contexts,
            f"num_contexts is {contexts} in a batch of {len(lens)}",
        )  # fmt: skip
        for field, value in (
            ("num_ctx_tokens", sum(lens[:contexts])),
            ("num_generations", len(lens) - contexts),
            ("num_tokens", sum(lens)),
        ):
            if field in seen:
                check.equal(moment, field, value, seen[field], f"it follows from num_contexts and lengths {lens}")


@invariant(
    "request-types-match-layout",
    reads=("host_request_types", "num_contexts"),
    museum=("TRT-23", "TRT-27", "VLL-15"),
    predicates=("P1", "P3"),
)
def request_types_match_layout(step: StepCase, check: Check) -> None:
    """At every sub-step the first ``num_contexts`` rows are typed as contexts and all others as generations."""
    for moment in step.moments:
        seen = moment.seen
        if "host_request_types" in seen and "num_contexts" in seen:
            types, contexts = seen["host_request_types"], seen["num_contexts"]
            expected = [0] * contexts + [1] * (len(step.rows) - contexts)
            check.equal(moment, "host_request_types", expected, types, f"num_contexts is {contexts}")


@invariant(
    "host-equals-device",
    reads=("_seq_lens", "_seq_lens_cuda", "prompt_lens_cpu", "prompt_lens_cuda"),
    museum=("TRT-93", "TRT-06", "VLL-03"),
    predicates=("P1",),
)
def host_equals_device(step: StepCase, check: Check) -> None:
    """At every sub-step the host and the device copy of a length agree."""
    for moment in step.moments:
        seen = moment.seen
        for host, device in _COPIES:
            if host in seen and device in seen:
                check.agree(moment, device, seen[host], seen[device], host)
