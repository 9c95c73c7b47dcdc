"""What `pip install specfuzz` brings."""

from __future__ import annotations

import os
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
PACKAGES = {"scenarios", "reference", "engines", "faults", "invariants", "strategies", "museum", "fuzz"}
METADATA = "specfuzz-0.1.0.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    [path] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    assert Path(path).name == "specfuzz-0.1.0-py3-none-any.whl"
    return ZipFile(path)


def test_it_holds_the_rooms_and_nothing_else(wheel: ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {*PACKAGES, METADATA}


def test_it_holds_every_module(wheel: ZipFile) -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    sources = {name for name in listed.stdout.split() if name.split("/")[0] in PACKAGES}
    assert sources <= set(wheel.namelist())


def test_every_room_is_typed(wheel: ZipFile) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_its_metadata(wheel: ZipFile) -> None:
    metadata = message_from_bytes(wheel.read(f"{METADATA}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    unconditional = [r for r in metadata.get_all("Requires-Dist", []) if ";" not in r]
    assert [requirement.split(">")[0] for requirement in unconditional] == ["hypothesis", "rich", "typer"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"torch", "tensorrt-llm", "gate"}
    assert wheel.read(f"{METADATA}/entry_points.txt").decode().split() == [
        "[console_scripts]",
        *("specfuzz", "=", "fuzz.cli:main"),
    ]


@pytest.mark.exhaustive
def test_it_works_away_from_the_checkout(wheel: ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    # Coverage measures packages by name, and would take these for the checkout's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    code = "import fuzz.cli, sys; print(fuzz.cli.__file__); sys.argv[1:] = ['list', 'workers']; fuzz.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    place, *output = done.stdout.splitlines()
    assert place == str(tmp_path / "site" / "fuzz" / "cli.py")
    assert any("Eagle3OneModelWorker" in line for line in output)
