"""The page of a finding fits a screen and points at the first difference."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

import reference
from fuzz.explain import SCREEN, explain, scenario_lines
from invariants import Verdict
from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Peer,
    Phase,
    Request,
    Scenario,
    Step,
    Substep,
    Trace,
    Violation,
    check,
)
from tests.fuzz.conftest import Snapshot
from tests.fuzz.fakes import Forgetful, edit
from tests.fuzz.samples import FINDING, MIXED


def verdict(trace: Trace, expected: Trace | None = None) -> Verdict:
    return Verdict((FINDING.violation,), {}, trace, reference.trace(MIXED) if expected is None else expected)


def forgetful() -> Trace:
    session = Forgetful().open(MIXED.config, MIXED.requests)
    for step in MIXED.steps:
        session.step(step)
    return session.trace()


def page(verdict: Verdict | None, violation: Violation = FINDING.violation) -> str:
    return "\n".join(line.text for line in explain(replace(FINDING, violation=violation), verdict, FINDING.id))


def test_the_page_of_a_finding(snapshot: Snapshot) -> None:
    snapshot("explain", page(verdict(forgetful())))


def test_the_first_difference_is_marked() -> None:
    marked = [line.text for line in explain(FINDING, verdict(forgetful()), FINDING.id) if line.marked]
    assert marked[-1].split() == [">", "restored", "num_contexts", "1", "0"]
    assert "> steps[2] eager K=1: context 1 (5 tokens), generation 0 (drafts agree 1); finishes 0" in marked


def test_later_differences_are_told_apart_from_the_first() -> None:
    trace = forgetful()
    third = edit(trace.steps[2], "updated", free_blocks=0)
    *_, last, legend = explain(FINDING, verdict(replace(trace, steps=(*trace.steps[:2], third))), FINDING.id)
    assert last.text.split() == ["!", "updated", "free_blocks", "12", "0"]
    assert not last.marked
    assert legend.text == "(> differs first; ! differs too)"


def test_without_a_run_there_is_no_timeline(snapshot: Snapshot) -> None:
    died = replace(FINDING, invariant="process-survives", bug="TRT-13/MTPEagleWorker", raised_at=None)
    violation = Violation(invariant="process-survives", step=0, message="the process was killed by SIGSEGV")
    snapshot(
        "explain_death", "\n".join(line.text for line in explain(replace(died, violation=violation), None, died.id))
    )


def test_an_exception_is_part_of_the_timeline(snapshot: Snapshot) -> None:
    trace = forgetful()
    failed = Substep("failed", 0, "eager", {"exception": "AssertionError", "message": "saved state", "num_contexts": 0})
    first, second, third = trace.steps
    broken = replace(third, outcome="fatal", substeps=(*third.substeps[:1], failed))
    violation = Violation(
        invariant="steps-complete", step=2, substep="failed", field="exception", actual="AssertionError"
    )
    text = page(verdict(replace(trace, steps=(first, second, broken))), violation)
    assert "steps[2] eager: fatal, AssertionError (not planned): saved state" in text
    assert '> failed    exception  null      "AssertionError"' in text


def test_a_step_of_which_no_field_differs_is_no_table_of_empty_rows() -> None:
    violation = Violation(invariant="replay-equals-eager", step=1, expected="tolerated", actual="ok")
    last = page(verdict(forgetful()), violation).splitlines()[-1]
    names = "prepared, entered, verified, saved, draft[0], draft[1], restored, updated"
    assert last == f"  {names}: nothing that is shown differs from the reference"


def test_each_exception_is_shown_with_its_place() -> None:
    first, *rest = forgetful().steps
    fields = {"exception": "InjectedOutOfMemoryError", "message": "planned", "raised_at": "mtp.py:7"}
    failed = replace(first, substeps=(Substep("failed", 0, "warmup", fields),), injected=True)
    text = page(verdict(replace(forgetful(), steps=(failed, *rest))))
    assert "tolerated, InjectedOutOfMemoryError (planned, raised at mtp.py:7): planned" in text


def test_a_step_that_was_not_reached_says_so() -> None:
    trace = forgetful()
    assert page(verdict(replace(trace, steps=trace.steps[:2]))).endswith("steps[2] was not reached")


def test_a_step_of_which_the_oracle_knows_nothing_has_no_expected_side() -> None:
    trace = forgetful()
    text = page(verdict(trace, replace(trace, steps=trace.steps[:2])))
    assert "  entered   num_contexts            1" in text


def test_many_differences_are_cut_and_long_values_too() -> None:
    trace = forgetful()
    third = trace.steps[2]
    restored = third.find("restored")
    assert restored is not None
    changed = dict.fromkeys(restored.fields, "x" * 100)
    substeps = [replace(s, fields=changed) if s is restored else s for s in third.substeps]
    text = page(verdict(replace(trace, steps=(*trace.steps[:2], replace(third, substeps=tuple(substeps))))))
    assert f"and {len(changed) - 6} more fields" in text
    assert '"' + "x" * 40 + "..." in text


def test_forwards_of_one_step_are_told_apart() -> None:
    trace = forgetful()
    third = trace.steps[2]
    again = tuple(replace(s, run=1) for s in third.substeps[1:-1])
    text = page(verdict(replace(trace, steps=(*trace.steps[:2], replace(third, substeps=(*third.substeps, *again))))))
    assert "restored run 1" in text
    assert text.endswith("; run N: the forward is repeated on one preparation, as warm-up and capture of a graph do)")


def test_a_long_scenario_fits_a_screen() -> None:
    step = Step(draft_len=1, generations=(Generation(request=0),))
    long = check(
        Scenario(
            config=Config(worker="PARDWorker", max_draft_len=1),
            requests=(Request(id=0, prompt_len=1),),
            steps=(Step(draft_len=1, contexts=(Context(request=0, chunk=1),)), *[step] * 39),
        )
    )
    lines = [line.text for line in scenario_lines(long, failing=30)]
    assert len(lines) == SCREEN + 4
    assert lines[2] == "  ... 15 steps"
    assert lines[3].startswith("  steps[15] ")
    assert lines[-2] == "> steps[30] eager K=1: generation 0"
    assert lines[-1] == "  ... 9 more steps"
    whole = [line.text for line in scenario_lines(long)]
    assert whole[2] == "  ... 24 steps"
    assert whole[-1] == "  steps[39] eager K=1: generation 0"


def test_an_iteration_without_rows_says_what_it_does() -> None:
    steps = (Step(draft_len=1, contexts=(Context(request=0, chunk=1),)), Step(draft_len=1))
    config = Config(worker="PARDWorker", max_draft_len=1, overlap=True)
    waiting = check(Scenario(config=config, requests=(Request(id=0, prompt_len=1),), steps=steps))
    assert [line.text for line in scenario_lines(waiting)][-1] == "  steps[1] eager K=1: waits for the step before"


def test_the_note_of_a_scenario_is_one_line_of_the_page() -> None:
    noted = replace(MIXED, note="seen in\nthe field")
    assert [line.text for line in scenario_lines(noted)][1] == "  note: seen in the field"


def test_a_scenario_without_requests_names_none() -> None:
    startup = replace(MIXED, requests=(), steps=MIXED.steps[:1])
    assert [line.text for line in scenario_lines(startup)][1].startswith("  steps[0] warmup")


def test_where_long_values_are_cut_the_first_difference_is_shown() -> None:
    many = list(range(100, 140))
    wrong = [*many[:30], 7, *many[31:]]
    for expected, actual, place, one, other in (
        (many, wrong, "[30]", "130", "7"),
        ([many, many], [many, many[:39]], "[1][39]", "139", "-"),
        ({"0": many}, {"0": wrong}, "[0][30]", "130", "7"),
    ):
        violation = replace(FINDING.violation, expected=expected, actual=actual)
        text = page(verdict(forgetful()), violation)
        (line,) = (line for line in text.splitlines() if line.startswith("> restored"))
        assert f"... {place}: {one} " in line
        assert line.endswith(f"... {place}: {other}")


OTHER: dict[type, Any] = {bool: True, int: 9, float: 0.5, str: "other", type(None): 9, tuple: (9,), Phase: Phase.REPLAY}
"""A value that no field has by default."""
OTHER_OF: dict[str, Any] = {
    "contexts": (Context(request=0, chunk=9),),
    "generations": (Generation(request=0),),
    "fault": Fault(site="sampler.sample", occurrence=1, kind=FaultKind.OOM),
    "peers": (Peer(),),
}
"""Of a step, whose fields hold objects."""


def whole(part: Config | Request | Step | Context | Generation | Peer) -> str:
    """A scenario that holds ``part``, as it is printed."""
    config = part if isinstance(part, Config) else Config(worker="PARDWorker", max_draft_len=1)
    step = part if isinstance(part, Step) else Step(draft_len=1)
    if isinstance(part, Context):
        step = replace(step, contexts=(part,))
    if isinstance(part, Generation):
        step = replace(step, generations=(part,))
    if isinstance(part, Peer):
        step = replace(step, peers=(part,))
    requests = (part,) if isinstance(part, Request) else ()
    return "\n".join(line.text for line in scenario_lines(Scenario(config=config, requests=requests, steps=(step,))))


@pytest.mark.parametrize(
    ("part", "without"),
    [
        (Config(worker="PARDWorker", max_draft_len=1), ()),
        (Request(id=0, prompt_len=1, prefix_of=1), ()),
        (Step(draft_len=1), ()),
        (Context(request=None, chunk=1), ()),
        (Context(request=0, chunk=1), ()),
        (Generation(request=None), ()),
        # These two follow from the earlier steps.
        (Generation(request=0), ("past", "accept")),
        (Peer(), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_not_at_its_default_is_printed(part: Any, without: tuple[str, ...]) -> None:
    plain = whole(part)
    for field in fields(part):
        name, value = field.name, getattr(part, field.name)
        other = OTHER_OF.get(name) if isinstance(part, Step) and name in OTHER_OF else OTHER[type(value)]
        if name not in without:
            assert whole(replace(part, **{name: other})) != plain, f"{type(part).__name__}.{name} is not printed"


def test_how_many_drafts_are_verified_is_said() -> None:
    assert "generation dummy (3 cached, accepts 1, verifies 0)" in whole(Generation(request=None, past=3, verify=0))
    assert "generation 7 (drafts agree 2, come close 1, automaton matches 5, verifies 2)" in whole(
        Generation(request=7, agree=2, near=1, match=5, verify=2)
    )
