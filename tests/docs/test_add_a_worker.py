"""The page on adding a worker is followed to the letter, in a copy of the rooms."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the portable engine needs torch")

ROOT = Path(__file__).parents[2]
ROOMS = ("scenarios", "reference", "engines", "faults", "invariants", "strategies", "museum", "fuzz")
PAGE = (ROOT / "docs/add-a-worker.md").read_text()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rooms with the worker of the page."""
    folder = tmp_path_factory.mktemp("rooms")
    for room in ROOMS:
        # With what is compiled, but for files that another process is just writing.
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("*.pyc.*"))
    files = dict(re.findall(r"^`([\w/]+\.py)`:.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
    assert set(files) == {"reference/workers/eagle.py", "engines/portable/speculative/eagle.py", "museum/own_01.py"}
    for name, text in files.items():
        (folder / name).write_text(f'"""From the page."""\n\n{text}')
    traits = folder / "scenarios/traits.py"
    (line,) = re.findall(r"^WorkerTraits\(.*\)$", PAGE, re.MULTILINE)
    end = '    )\n}\n"""Workers by class name.'
    assert traits.read_text().count(end) == 1
    traits.write_text(traits.read_text().replace(end, f"        {line},\n{end}"))
    return folder


COMMANDS = (
    ("run", "--worker", "EagleOneModelWorker", "--max-cases", "12", "--workers", "1", "--json"),
    ("museum", "--bug", "OWN-01", "--json"),
)
RUN_ALL = "import sys; from fuzz import cli; [cli.invoke(command.split()) for command in sys.argv[1:]]"


@pytest.fixture(scope="module")
def documents(copy: Path) -> list[Any]:
    """The JSON documents of the commands, run in the copy by one process: most of its time is its start."""
    # The copy's lines are not the project's, so nobody measures them.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment = kept | {"SPECFUZZ_HOME": str(copy / "home"), "PYTHONPATH": str(copy)}
    command = [sys.executable, "-c", RUN_ALL, *map(" ".join, COMMANDS)]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    printed = [json.loads(text) for text in re.findall(r"^\{$.*?^\}$", done.stdout, re.MULTILINE | re.DOTALL)]
    assert len(printed) == len(COMMANDS), done.stdout + done.stderr
    return printed


@pytest.mark.exhaustive
def test_oracle_and_engine_agree(documents: list[Any]) -> None:
    report = documents[0]
    assert report["workers"]["EagleOneModelWorker"]["cases"] == 12
    assert report["findings"] == []
    assert report["faults"]["fired"] == report["faults"]["planned"] > 0


@pytest.mark.exhaustive
def test_the_mistake_is_found(documents: list[Any]) -> None:
    (bug,) = documents[1]["bugs"]
    assert (bug["id"], bug["found"]) == ("OWN-01/EagleOneModelWorker", True)


def test_the_page_is_short() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert sum(bool(line.strip()) for block in code for line in block.splitlines()) < 40
