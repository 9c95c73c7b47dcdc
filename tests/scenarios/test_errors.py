"""Errors are one line that names the field, says what is wrong and what to do."""

from __future__ import annotations

import pytest

from scenarios import ScenarioError, UsageError, closest


def test_a_message_is_one_line() -> None:
    assert str(UsageError("first\n  second\r\n\tthird")) == "first second third"


def test_text_from_a_file_cannot_steer_the_terminal_nor_break_its_encoding() -> None:
    assert str(UsageError("no field \x1b[2J\ud800\x00 here")) == "no field ?[2J?? here"


def test_a_scenario_error_keeps_its_parts() -> None:
    error = ScenarioError("steps[1].draft_len", "9 is outside 0..3", "write 3")
    assert str(error) == "steps[1].draft_len: 9 is outside 0..3; write 3"
    assert (error.field, error.problem, error.remedy) == ("steps[1].draft_len", "9 is outside 0..3", "write 3")


@pytest.mark.parametrize(
    ("field", "prefix", "path"),
    [
        ("agree", "generations[0]", "generations[0].agree"),
        ("[0].agree", "generations", "generations[0].agree"),
        ("", "steps", "steps"),
    ],
)
def test_the_path_of_a_field_grows_outwards(field: str, prefix: str, path: str) -> None:
    error = ScenarioError(field, "is wrong", "mend it").within(prefix)
    assert error.field == path
    assert str(error) == f"{path}: is wrong; mend it"


def test_the_closest_name_ignores_case() -> None:
    assert closest("eagle3onemodelworke", ["PARDWorker", "Eagle3OneModelWorker"]) == (
        "did you mean 'Eagle3OneModelWorker'?"
    )


def test_all_names_are_listed_when_none_is_near() -> None:
    assert closest("zzz", ["warmup", "eager"]) == "write one of eager, warmup"
    assert closest("zzz", []) == "none is known"


def test_a_part_of_a_name_is_near_and_a_few_common_letters_are_not() -> None:
    assert closest("pard", ["PARDWorker", "MTPWorker"]) == "did you mean 'PARDWorker'?"
    assert closest("nope", ["run-complete", "pool"]) == "write one of pool, run-complete"
    many = [f"bug-{i:02}" for i in range(20)]
    assert closest("nope", many, listed="`list`") == "see `list`"


def test_of_many_names_the_nearest_are_listed() -> None:
    many = [f"bug-{i:02}" for i in range(20)]
    remedy = closest("7", many)
    assert remedy.startswith("the nearest of 20 are ")
    assert {"bug-07", "bug-17"} < set(remedy[len("the nearest of 20 are ") :].split(", "))
