"""What `specfuzz explain --provenance` says."""

from __future__ import annotations

import pytest

from fuzz.provenance import MOST, misread_rows, provenance_lines
from fuzz.subject import Subject
from museum import BUGS
from scenarios import UsageError
from tests.museum.scenario_of import scenario_of

BUG = BUGS["SGL-06/SAWorker/text"]


def test_rows_are_followed_under_the_defect_of_the_finding_and_without_it() -> None:
    pytest.importorskip("torch", reason="the portable engine needs torch")
    subject = Subject(name="mixed up", scenario=scenario_of(BUG), bug=BUG.id, seeded=True)
    first, *_ = misread_rows(subject)
    assert first == "steps[1] restored: row 0 of text (request 1) was read as request 0's"
    assert misread_rows(Subject(name="right", scenario=subject.scenario)) == []


def test_other_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="--provenance: rows are followed in the portable engine only; leave it out"):
        misread_rows(Subject(name="upstream", scenario=scenario_of(BUG), engine="tensorrt_llm"))


def test_the_first_rows_are_listed() -> None:
    lines = [line.text for line in provenance_lines([f"row {i}" for i in range(MOST + 2)])]
    assert lines[1] == f"provenance: {MOST + 2} rows were read as another request's"
    assert lines[2:] == [*(f"  row {i}" for i in range(MOST)), "  ... 2 more"]
    assert [line.marked for line in provenance_lines(["row 0", "row 1"])] == [False, False, True, False]
    assert "no row was seen to be read" in [*provenance_lines([])][-1].text
