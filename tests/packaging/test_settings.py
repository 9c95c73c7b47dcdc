"""The settings that CI rests on are what they seem to be."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ["scenarios", "reference", "engines", "faults", "invariants", "strategies", "museum", "fuzz"]


@pytest.mark.exhaustive(every=2, first=1)
@pytest.mark.parametrize("ci", ["", "true"], ids=["at-home", "in-ci"])
def test_hypothesis_profile_does_not_depend_on_ci(ci: str) -> None:
    code = (
        "import tests.conftest\n"
        "from hypothesis import settings as s\n"
        "d = s.default\n"
        "print(s.get_current_profile_name(), d.max_examples, d.derandomize, d.database, d.deadline, d.print_blob)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": ci} if ci else {})
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == "tests 50 True None None False\n"


def test_coverage_measures_branches_in_every_process_with_a_core_that_can() -> None:
    settings = coverage.Coverage(data_file=None, config_file=str(ROOT / "pyproject.toml"))
    assert settings.get_option("run:core") == "ctrace"
    assert settings.get_option("run:branch") is True
    assert settings.get_option("run:patch") == ["subprocess"]
    assert settings.get_option("run:source_pkgs") == MEASURED
    assert settings.get_option("run:omit") == ["*/engines/kernels/triton_kernels.py"]
    assert settings.get_option("report:fail_under") == 95


def test_nothing_measured_is_excused_from_coverage() -> None:
    for room in MEASURED:
        for source in (ROOT / room).rglob("*.py"):
            assert "pragma: no" not in source.read_text(), source


def test_ci_runs_the_test_command_of_the_readme() -> None:
    [command] = re.findall(r"^.*-c constraints.txt tox .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_a_plain_tox_runs_every_gate() -> None:
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    environments = tox["tox"]["env_list"].replace(" ", "").split(",")
    assert {"lint", "type", "cov"} < set(environments)
    measure, *_, report, xml, gate = tox["testenv:cov"]["commands"].split("\n")[2:]
    assert measure.startswith("python -m pytest --exhaustive --cov")
    assert (report, xml, gate) == ("coverage report", "coverage xml --quiet", "python -m fuzz.gate")
