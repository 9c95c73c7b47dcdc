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
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    files = dict(re.findall(r"^`([\w/]+\.py)`:.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
    assert set(files) == {"reference/workers/eagle.py", "engines/portable/speculative/eagle.py", "museum/own_01.py"}
    for name, text in files.items():
        (folder / name).write_text(f'"""From the page."""\n\n{text}')
    model = folder / "scenarios/model.py"
    (line,) = re.findall(r"^WorkerTraits\(.*\)$", PAGE, re.MULTILINE)
    first = '        WorkerTraits("Eagle3OneModelWorker"'
    assert first in model.read_text()
    model.write_text(model.read_text().replace(first, f"        {line},\n{first}", 1))
    return folder


def specfuzz(folder: Path, *options: str) -> Any:
    """The JSON document of a command in the copy."""
    # The copy's lines are not the project's, so nobody measures them.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment = kept | {"SPECFUZZ_HOME": str(folder / "home"), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "fuzz", *options, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_oracle_and_engine_agree(copy: Path) -> None:
    report = specfuzz(copy, "run", "--worker", "EagleOneModelWorker", "--max-cases", "30", "--workers", "1")
    assert report["workers"]["EagleOneModelWorker"]["cases"] == 30
    assert report["findings"] == []
    assert report["faults"]["fired"] == report["faults"]["planned"] > 0


def test_the_mistake_is_found(copy: Path) -> None:
    (bug,) = specfuzz(copy, "museum", "--bug", "OWN-01")["bugs"]
    assert (bug["id"], bug["found"]) == ("OWN-01/EagleOneModelWorker", True)


def test_the_page_is_short() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert sum(bool(line.strip()) for block in code for line in block.splitlines()) < 40
