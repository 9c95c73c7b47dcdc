"""A plain run of the tests leaves out what repeats others, says so, and leaves out nothing when asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.left_out import LeftOut

pytest_plugins = "pytester"

TESTS = """
import pytest

@pytest.mark.exhaustive(every=3, first=1)
@pytest.mark.parametrize("n", range(7))
def test_some(n): assert n in (1, 4)

@pytest.mark.exhaustive(shows=lambda worker, slugs: {worker, *slugs})
@pytest.mark.parametrize(("worker", "slugs"), [("A", "x"), ("B", "x"), ("A", "xy"), ("B", "y"), ("A", "")])
def test_shown(worker, slugs): assert (worker, slugs) in (("A", "x"), ("B", "x"), ("A", "xy"))

def test_loop(part_of): assert list(part_of(range(5), every=2)) == [0, 2, 4]

@pytest.mark.parametrize("n", range(3))
def test_all(n): pass

@pytest.mark.exhaustive
def test_long(): pass
"""
SAYS = "left out: 8 tests that repeat others, 2 members of loops in tests; `pytest --exhaustive` runs all"


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest("from tests.left_out import part_of, pytest_addoption, pytest_configure")
    pytester.makepyfile(test_it=TESTS)
    return pytester


def test_a_plain_run_has_each_mechanism_and_counts_the_rest(tests: pytest.Pytester) -> None:
    done = tests.runpytest_inprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=9, deselected=8)
    assert SAYS in done.outlines


@pytest.mark.parametrize(
    "options", [["--exhaustive"], ["test_it.py::test_some", "test_it.py::test_loop"], ["-k", "test_"]]
)
def test_everything_runs_when_it_is_asked_for_or_named(tests: pytest.Pytester, options: list[str]) -> None:
    done = tests.runpytest_inprocess("-p", "no:cacheprovider", *options)
    outcomes = done.parseoutcomes()
    assert outcomes["failed"] == (6 if "::" in options[0] else 8)
    assert "left out" not in done.stdout.str()


def test_what_several_processes_leave_out_is_counted_once() -> None:
    config = SimpleNamespace(args=["tests"], getoption={"keyword": "", "exhaustive": False}.get)
    plugin = LeftOut(config)  # type: ignore[arg-type]
    for members in (3, 4):
        plugin.pytest_testnodedown(SimpleNamespace(workeroutput={"left_out": [7, members]}), None)
    plugin.pytest_testnodedown(SimpleNamespace(), "it crashed")
    assert (plugin.tests, plugin.members) == (7, 7)
