"""``verify``, the order of what it reports, and adding up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import reference
from invariants import Tally, Verdict, all_invariants, verify
from invariants.check import difference
from scenarios import Scenario, ScenarioError, Substep, Trace, UsageError
from tests.invariants.cases import EAGLE, MTP, failing, served, started_up
from tests.invariants.synthetic import dressed, edit, edit_step

MIXED, FAILING = served(EAGLE), failing(EAGLE)


def _verdict(trace: Trace) -> Verdict:
    return verify(MIXED, lambda _: trace, relations=False)


def test_a_right_run_has_no_first_violation_and_counts_for_every_invariant() -> None:
    verdict = verify(MIXED, dressed)
    assert verdict.first is None
    assert list(verdict.counts) == [i.slug for i in all_invariants()]
    assert verdict.trace is dressed(MIXED)
    assert verdict.expected.engine == "reference"


def test_the_earliest_substep_comes_first_and_at_one_place_the_cause_before_its_effects() -> None:
    late = edit(dressed(MIXED), 2, "restored", "num_contexts", lambda _: 2)
    early = edit(late, 1, "draft[1]", "kv_lens_cuda", lambda kv: [kv[0], kv[1] + 1])
    places = [(v.step, v.substep, v.invariant) for v in _verdict(early).violations]
    assert places[:3] == [
        (1, "draft[1]", "kv-lens-balanced"),
        (1, "draft[1]", "draft-position-is-kv-minus-one"),
        (1, "draft[1]", "kv-lens-equals-reference"),
    ]
    assert [slug for step, _, slug in places if step == 2] == [
        "restored-layout",
        "derived-counters-consistent",
        "derived-counters-consistent",
        "request-types-match-layout",
        "layout-equals-reference",
    ]


def test_a_violation_names_field_place_and_both_values() -> None:
    trace = edit(dressed(MIXED), 1, "draft[1]", "kv_lens_cuda", lambda kv: [kv[0], kv[1] + 3])
    first = _verdict(trace).first
    assert first is not None
    assert (first.step, first.substep, first.run, first.field) == (1, "draft[1]", 0, "kv_lens_cuda")
    assert first.expected == [8, 10]
    assert first.actual == [8, 13]
    assert first.message.startswith("kv_lens_cuda[1] is 13 and should be 10: ")


def test_nothing_is_compared_after_a_step_that_left_the_plan() -> None:
    trace = edit(dressed(MIXED), 6, "updated", "emitted", lambda _: {})
    assert {v.step for v in _verdict(trace).violations} == {6}
    assert {v.step for v in _verdict(edit_step(trace, 2, outcome="tolerated")).violations} == {2}


def test_a_relation_compares_as_far_as_both_runs_went() -> None:
    slug = "row-order-does-not-matter"
    short = replace(dressed(MIXED), steps=dressed(MIXED).steps[:3])
    assert not verify(MIXED, lambda s: short if s == MIXED else dressed(s), only=[slug]).violations
    verdict = verify(MIXED, lambda s: dressed(s) if s == MIXED else short, only=[slug])
    assert [v.step for v in verdict.violations] == [3, 4, 6]
    assert verdict.first is not None
    assert verdict.first.message == "the step ended ok, in the twin never run"


def test_of_two_copies_none_is_called_the_wrong_one() -> None:
    trace = edit(dressed(MIXED), 1, "restored", "_seq_lens_cuda", lambda lens: [lens[0] + 1, *lens[1:]])
    (found,) = verify(MIXED, lambda _: trace, only=["host-equals-device"]).violations
    host, device = found.expected[0], found.actual[0]
    assert found.message == f"_seq_lens_cuda[0] is {device} and _seq_lens[0] is {host}: they should agree"


def test_a_twin_that_ends_otherwise_says_with_which_exception() -> None:
    sound = dressed(MIXED)
    fields = {"exception": "ValueError", "message": "no such row", "raised_at": "mtp.py:7"}
    broken = edit_step(sound, 3, outcome="fatal", substeps=(Substep("failed", 0, "eager", fields),))
    run = {False: sound, True: broken}
    slug = "row-order-does-not-matter"
    (found, *_) = verify(MIXED, lambda s: run[s != MIXED], only=[slug]).violations
    assert found.message == "the step ended ok, in the twin fatal (ValueError at mtp.py:7: no such row)"
    run[True] = replace(broken, steps=broken.steps[:4])
    found = verify(MIXED, lambda s: run[s != MIXED], only=[slug]).violations[-1]
    ended = "never run, as its last one ended fatal (ValueError at mtp.py:7: no such row)"
    assert found.message == f"the step ended ok, in the twin {ended}"
    run[True] = broken
    (found, *_) = verify(MIXED, lambda s: run[s == MIXED], only=[slug]).violations
    assert found.message == "the step ended fatal (ValueError at mtp.py:7: no such row), in the twin ok"


def test_a_relation_does_not_compare_what_is_drafted_for_dummies_where_that_is_not_specified() -> None:
    scenario, slug = started_up(MTP), "startup-leaves-no-trace"

    def run(asked: Scenario, field: str) -> Trace:
        # The capture is kept, as its graph is replayed; the warm-up before it is not in the twin.
        step = len(asked.steps) - 4
        restored = dressed(asked).steps[step].find("restored")
        assert restored is not None
        changed = replace(restored, fields={**restored.fields, field: [step]})
        substeps = tuple(changed if s is restored else s for s in dressed(asked).steps[step].substeps)
        return edit_step(dressed(asked), step, substeps=substeps)

    assert not verify(scenario, lambda asked: run(asked, "next_draft_tokens"), only=[slug]).violations
    (found,) = verify(scenario, lambda asked: run(asked, "worker_state"), only=[slug]).violations
    assert (found.step, found.field) == (1, "worker_state")


def test_a_relation_whose_twin_the_engine_cannot_run_says_nothing() -> None:
    def run(asked: Scenario) -> Trace:
        if asked != MIXED:
            raise UsageError("steps[0].draft_len: this version always drafts 2 tokens; write 2")
        return dressed(asked)

    verdict = verify(MIXED, run, only=["draft-lengths-do-not-matter", "output-lossless"])
    assert verdict.violations == ()
    assert verdict.counts["draft-lengths-do-not-matter"] == (0, 0)
    with pytest.raises(UsageError, match="always drafts"):
        verify(served(MTP), run)

    def no_such_twin(asked: Scenario) -> Trace:
        if asked != MIXED:
            raise ScenarioError("steps[0]", "could not come first", "start with another")
        return dressed(asked)

    with pytest.raises(ScenarioError, match="could not come first"):
        verify(MIXED, no_such_twin, only=["draft-lengths-do-not-matter"])


def test_only_the_asked_invariants_are_counted() -> None:
    verdict = verify(MIXED, dressed, only=["output-lossless", "saved-state-empty"])
    assert list(verdict.counts) == ["saved-state-empty", "output-lossless"]


def test_an_unknown_invariant_is_refused_with_the_closest() -> None:
    with pytest.raises(UsageError, match="none is called 'saved-state-emty'; did you mean 'saved-state-empty'"):
        verify(MIXED, dressed, only=["saved-state-emty"])


def test_a_given_oracle_trace_is_used() -> None:
    wrong = edit(reference.trace(MIXED), 1, "draft[1]", "kv_lens_cuda", lambda kv: [kv[0], kv[1] + 1])
    verdict = verify(MIXED, dressed, relations=False, expected=wrong)
    assert [v.invariant for v in verdict.violations] == ["kv-lens-equals-reference"]
    assert verdict.expected is wrong


def test_a_run_without_steps_is_no_pass() -> None:
    with pytest.raises(UsageError, match="ran no step"):
        verify(MIXED, lambda _: Trace("portable", "cpu", ()))


def test_verdicts_add_up() -> None:
    tally = Tally()
    tally += verify(MIXED, dressed, only=["output-lossless", "fault-surfaces"])
    tally += verify(MIXED, dressed, only=["output-lossless", "fault-surfaces"])
    assert (tally.cases, tally.steps) == (2, 14)
    assert tally.unreached == ["fault-surfaces"]
    reached, held = tally.counts["output-lossless"]
    assert reached == held == 2 * 14
    tally += verify(FAILING, dressed, only=["fault-surfaces"])
    tally.merge({"output-lossless": (2, 1)})
    assert tally.unreached == []
    assert tally.counts["output-lossless"] == (reached + 2, held + 1)


@pytest.mark.parametrize(
    ("expected", "actual", "path"),
    [
        ([1, [2, 3]], [1, [2, 4]], ("[1][1]", 3, 4)),
        ([1, 2], [1], ("", [1, 2], [1])),
        ({0: [1], 1: [2]}, {0: [1], 1: [3]}, ("[1][0]", 2, 3)),
        ({0: 1}, {1: 1}, ("", {0: 1}, {1: 1})),
        (True, False, ("", True, False)),
    ],
)
def test_the_first_difference_is_found(expected: object, actual: object, path: tuple[str, object, object]) -> None:
    assert difference(expected, actual) == path


def test_invariants_need_neither_torch_nor_an_engine() -> None:
    code = "import sys, invariants, invariants.testing; print([m for m in ('torch', 'engines') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
