"""What a stand-alone file can assert of a run that fails: one field, at one place, with its value.

A file has upstream's metadata and worker, and neither KV cache nor executor. It reads the metadata around a forward and
in its draft calls, and what the worker returns that no token depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from invariants import Verdict
from scenarios import Phase, StepTrace, Substep, Violation
from scenarios.trace import FAILED, PREPARED, RESTORED, VERIFIED

EQUAL: Final = "equal"
ONE_OF: Final = "one-of"
IDENTITY: Final = "identity"
EXCEPTION: Final = "exception"
OUTPUT: Final = "output"

DRAFT_CALLS: Final = "draft calls"
"""Stands for the number of draft calls of a forward, which is no field of a trace."""

READABLE: Final = {
    "num_contexts": "attn_metadata.num_contexts",
    "num_generations": "attn_metadata.num_generations",
    "num_ctx_tokens": "attn_metadata.num_ctx_tokens",
    "num_tokens": "attn_metadata.num_tokens",
    "_seq_lens": "attn_metadata._seq_lens.tolist()",
    "_seq_lens_cuda": "attn_metadata._seq_lens_cuda.tolist()",
    "kv_lens_cuda": "attn_metadata.kv_lens_cuda[: attn_metadata.num_seqs].tolist()",
    "host_request_types": "attn_metadata.host_request_types[: attn_metadata.num_seqs].tolist()",
    "use_spec_decoding": "attn_metadata.use_spec_decoding",
    "all_rank_num_tokens": "attn_metadata.all_rank_num_tokens",
    "_saved_tensors": "list(attn_metadata._saved_tensors)",
}
"""Fields of the metadata, and how a file reads them."""
OUTPUTS: Final = {"new_tokens_lens": 'outputs["new_tokens_lens"].tolist()'}
"""The same for what the worker returns."""
INPUTS: Final = {"position_ids": "position_ids.tolist()"}
"""The same for what a draft call is given."""
OBJECTS: Final = ("_seq_lens", "_seq_lens_cuda", "kv_lens_cuda", "host_request_types")
"""Tensors whose identity a file can see."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An assertion that the run violates.

    violation  what it comes from
    kind       ``EQUAL``; ``ONE_OF``: ``expected`` lists the values allowed; ``IDENTITY``: ``actual`` lists the tensors
               that were exchanged; ``EXCEPTION``: ``actual`` is the failure that was not due; ``OUTPUT``: ``EQUAL``,
               of what the worker returned
    read       expression of the file; empty where ``kind`` says all
    in_draft   draft call before which it is read; None: after the forward
    """

    violation: Violation
    kind: str
    field: str
    expected: Any = None
    actual: Any
    read: str = ""
    in_draft: int | None = None

    @property
    def step(self) -> int:
        """Index of the step."""
        return self.violation.step

    @property
    def run(self) -> int:
        """Forward within the step."""
        return self.violation.run

    @property
    def place(self) -> str:
        """Step and sub-step, for a person."""
        where = self.violation.substep or RESTORED
        return f"steps[{self.step}] {where}" + (f" run {self.run}" if self.run else "")

    @property
    def message(self) -> str:
        """What the file's assertion says."""
        if self.kind == EXCEPTION:
            return f"{self.place}: {self.actual}"
        if self.kind == IDENTITY:
            return f"{self.place}: {self.actual} are not the tensors that they were before the forward"
        verb = "should be one of" if self.kind == ONE_OF else "should be"
        return f"{self.place}: {self.field} is {self.actual} and {verb} {self.expected}"


def claims(verdict: Verdict, invariant: str | None = None) -> Iterator[Claim]:
    """What a file can assert, in the order of the violations; from the first one of ``invariant`` on, if there is."""
    violations = list(verdict.violations)
    first = next((i for i, v in enumerate(violations) if v.invariant == invariant), 0)
    seen: list[Claim] = []
    for violation in violations[first:]:
        claim = _claim(violation, verdict)
        if claim is not None and not any(claim.message == other.message for other in seen):
            seen.append(claim)
            yield claim


def _claim(violation: Violation, verdict: Verdict) -> Claim | None:
    if violation.step >= len(verdict.trace.steps):
        return None
    step = verdict.trace.steps[violation.step]
    said = verdict.expected.steps[violation.step]
    if step.phase is Phase.REPLAY or _accepts_otherwise(step, said, violation.run):
        # No Python of the worker runs, or it runs on counts that came of a wrong cache; a file chooses its counts.
        return None
    if violation.substep is None:
        return _draft_calls(violation)
    here = step.find(violation.substep, violation.run)
    field = violation.field
    if here is None or field is None:
        return None
    if field == "exception" and violation.expected is None:
        if step.find(PREPARED) is None or step.substeps[-2].name in (PREPARED, RESTORED):
            # It was the executor's.
            return None
        return Claim(violation=violation, kind=EXCEPTION, field=field, actual=violation.actual)
    if field == "identity":
        return _identity(violation, here, step.find(PREPARED))
    if field not in here:
        return None
    return _value(violation, here[field], said.find(*here.key))


def _accepts_otherwise(step: StepTrace, said: StepTrace, run: int) -> bool:
    """Whether a forward was seen to accept other counts than the oracle's."""
    verified, expected = step.find(VERIFIED, run), said.find(VERIFIED, run)
    field = "num_accepted_tokens"
    if verified is None or expected is None or field not in verified or field not in expected:
        return False
    return bool(verified[field] != expected[field])


def _value(violation: Violation, actual: Any, said: Substep | None) -> Claim | None:
    """A claim about a field with a value: the oracle's word counts, else that of the violation."""
    field, place = str(violation.field), str(violation.substep)
    in_draft = int(place[6:-1]) if place.startswith("draft[") else None
    readable = {**READABLE, **(INPUTS if in_draft is not None else OUTPUTS if place == RESTORED else {})}
    if field not in readable or (in_draft is None and place not in (RESTORED, FAILED)):
        return None
    kind = OUTPUT if field in OUTPUTS else EQUAL
    if said is not None and field in said:
        expected = said[field]
    else:
        expected = violation.expected
        kind = ONE_OF if _is_choice(expected, actual) else kind
    if expected == actual:
        return None
    return Claim(
        violation=violation,
        kind=kind,
        field=field,
        expected=expected,
        actual=actual,
        read=readable[field],
        in_draft=in_draft,
    )


def _is_choice(expected: Any, actual: Any) -> bool:
    """Whether ``expected`` lists values of the kind that ``actual`` is."""
    lists = isinstance(expected, list) and isinstance(actual, list)
    return lists and expected != [] and all(isinstance(each, list) for each in expected)


def _identity(violation: Violation, here: Substep, before: Substep | None) -> Claim | None:
    """A claim that tensors are still those of ``prepared``."""
    if before is None or violation.substep not in (RESTORED, FAILED):
        return None
    then, now = before.fields.get("identity", {}), here.fields.get("identity", {})
    changed = [name for name in OBJECTS if name in then and name in now and then[name] != now[name]]
    if not changed:
        return None
    return Claim(violation=violation, kind=IDENTITY, field="identity", expected=[], actual=changed)


def _draft_calls(violation: Violation) -> Claim | None:
    """A claim about the number of draft calls, from two lists of sub-steps that differ in it."""
    if violation.field is not None or not isinstance(violation.expected, list):
        return None
    counts = [_draft_counts(side) for side in (violation.expected, violation.actual)]
    for run in sorted({run for count in counts for run in count}):
        expected, actual = (count.get(run, 0) for count in counts)
        if expected != actual:
            place = Violation(invariant=violation.invariant, step=violation.step, substep=RESTORED, run=run)
            return Claim(
                violation=place,
                kind=EQUAL,
                field=DRAFT_CALLS,
                expected=expected,
                actual=actual,
                read="len(draft_model.seen)",
            )
    return None


def _draft_counts(keys: list[tuple[str, int]]) -> dict[int, int]:
    """Draft calls per run."""
    runs = [run for name, run in keys if name.startswith("draft[")]
    return {run: runs.count(run) for run in runs}
