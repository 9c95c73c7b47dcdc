"""What of a violation a file can assert."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz.claim import ONE_OF, Claim, claims
from invariants import Verdict
from scenarios import Phase, StepTrace, Substep, Trace, Violation

PREPARED: dict[str, Any] = {"num_contexts": 1, "identity": {"kv_lens_cuda": "a", "kv_cache_block_offsets": "b"}}


def step(*substeps: tuple[str, dict[str, Any]], phase: Phase = Phase.EAGER, run: int = 0) -> StepTrace:
    return StepTrace(0, phase, "ok", tuple(Substep(name, run, "eager", fields) for name, fields in substeps))


def made(actual: StepTrace, said: StepTrace, /, **violation: Any) -> Claim | None:
    """The claim that comes of a violation in a run of one step."""
    found = Violation(**{"invariant": "it", "step": 0, "message": "wrong", **violation})
    verdict = Verdict((found,), {}, Trace("portable", "cpu", (actual,)), Trace("reference", "cpu", (said,)))
    return next(claims(verdict), None)


def value(actual: Any, expected: Any, said: Any = None, /, **where: Any) -> Claim | None:
    """The claim that comes of a wrong value, about which the oracle says ``said``, if anything."""
    name, field = where.setdefault("substep", "restored"), where.setdefault("field", "num_contexts")
    oracle = {} if said is None else {field: said}
    phase = where.pop("phase", Phase.EAGER)
    return made(
        step((name, {field: actual}), phase=phase), step((name, oracle)), expected=expected, actual=actual, **where
    )


def test_the_oracle_has_the_last_word() -> None:
    """What an invariant expects may follow from a wrong value; the oracle's does not."""
    claim = value(0, 3, 1)
    assert claim is not None
    assert claim.message == "steps[0] restored: num_contexts is 0 and should be 1"
    assert value(0, 3, 0) is None
    claim = value(0, 3)
    assert claim is not None
    assert claim.expected == 3


def test_one_of_several_values() -> None:
    claim = value([6], [[5], [7]], field="kv_lens_cuda", substep="failed")
    assert claim is not None
    assert claim.kind == ONE_OF
    assert claim.message == "steps[0] failed: kv_lens_cuda is [6] and should be one of [[5], [7]]"


@pytest.mark.parametrize(
    "where",
    [
        {"substep": "prepared"},
        {"substep": "updated"},
        {"substep": "verified"},
        {"field": "target_kv"},
        {"field": "position_ids"},
        {"field": "new_tokens_lens", "substep": "failed"},
        {"field": "new_tokens_lens", "substep": "draft[0]"},
        {"phase": Phase.REPLAY},
        {"step": 1},
    ],
    ids=str,
)
def test_what_cannot_be_read(where: dict[str, Any]) -> None:
    assert value(0, 1, 1, **where) is None


def test_what_is_read_in_a_draft_call() -> None:
    claim = value([3, 4], [4, 5], [4, 5], field="position_ids", substep="draft[1]")
    assert claim is not None
    assert (claim.in_draft, claim.read) == (1, "position_ids.tolist()")


def test_counts_that_came_of_a_wrong_cache() -> None:
    """A file chooses the accepted counts; what follows from other counts is not to be seen in it."""
    restored: tuple[str, dict[str, Any]] = ("restored", {"num_contexts": 0})
    wrong = step(("verified", {"num_accepted_tokens": [1]}), restored)
    said = step(("verified", {"num_accepted_tokens": [2]}), ("restored", {"num_contexts": 1}))
    where = {"substep": "restored", "field": "num_contexts", "expected": 1, "actual": 0}
    assert made(wrong, said, **where) is None
    assert made(step(restored), said, **where) is not None


@pytest.mark.parametrize(
    ("before", "shows"),
    [
        ((), False),
        (("prepared",), False),
        (("prepared", "entered", "restored"), False),
        (("prepared", "entered"), True),
        (("prepared", "entered", "verified", "saved", "draft[0]"), True),
    ],
)
def test_a_failure_is_shown_where_it_was_the_forwards(before: tuple[str, ...], shows: bool) -> None:
    failed = step(*((name, {}) for name in before), ("failed", {"exception": "AssertionError"}))
    claim = made(failed, step(), substep="failed", field="exception", actual="AssertionError: it")
    assert (claim is not None) == shows
    if claim is not None:
        assert claim.message == "steps[0] failed: AssertionError: it"


def test_tensors_that_were_exchanged() -> None:
    def exchanged(name: str, substep: str = "restored") -> Claim | None:
        after = {"identity": {**PREPARED["identity"], name: "c"}}
        return made(step(("prepared", PREPARED), (substep, after)), step(), substep=substep, field="identity")

    claim = exchanged("kv_lens_cuda")
    assert claim is not None
    assert claim.actual == ["kv_lens_cuda"]
    assert exchanged("kv_cache_block_offsets") is None
    assert exchanged("kv_lens_cuda", "entered") is None


def test_the_number_of_draft_calls() -> None:
    def calls(expected: list[tuple[str, int]], actual: list[tuple[str, int]]) -> Claim | None:
        return made(step(), step(), expected=expected, actual=actual)

    both = [("prepared", 0), ("draft[0]", 0), ("draft[0]", 1), ("draft[1]", 1)]
    claim = calls(both, both[:-1])
    assert claim is not None
    assert claim.message == "steps[0] restored run 1: draft calls is 1 and should be 2"
    assert calls(both, both[1:]) is None
    assert made(step(), step(), expected="SpecWorkerBase", actual="PARDWorker") is None
