"""`pytest gpu_tests` cannot succeed without having run a test on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "gpu_tests" / "conftest.py"
TORCH_WITH_GPU = "__version__ = '0'\nclass cuda:\n    is_available = staticmethod(lambda: True)\n"
TORCH_WITHOUT_GPU = TORCH_WITH_GPU.replace("True", "False")
SKIPPED = "import pytest\n@pytest.mark.skip(reason='no')\ndef test_a(): pass\ndef test_b(): pytest.skip('no')\n"
PASSES = "def test_c(): pass\n"


def run(folder: Path, torch: str, tests: str, *options: str) -> tuple[int, str]:
    (folder / "torch.py").write_text(torch)
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_gpu.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", *options, "."]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(
    ("torch", "tests", "options", "reason"),
    [
        (TORCH_WITHOUT_GPU, PASSES, (), "gpu_tests: nothing ran: torch 0 finds no CUDA device"),
        ("raise ModuleNotFoundError('torch')", PASSES, (), "gpu_tests: nothing ran: torch is not installed"),
        (TORCH_WITH_GPU, SKIPPED, (), "gpu_tests: nothing ran: every test was skipped"),
        (TORCH_WITH_GPU, SKIPPED + PASSES, ("-k", "not test_c"), "gpu_tests: nothing ran: every test was skipped"),
        (TORCH_WITH_GPU, "", (), "gpu_tests: nothing ran: every test was skipped"),
    ],
    ids=["no-device", "no-torch", "all-skipped", "the-rest-deselected", "no-test"],
)
def test_nothing_ran_is_a_failure_with_a_reason(
    tmp_path: Path, torch: str, tests: str, options: tuple[str, ...], reason: str
) -> None:
    status, output = run(tmp_path, torch, tests, *options)
    assert status == 2
    assert reason in output


def test_one_test_that_ran_is_enough(tmp_path: Path) -> None:
    status, output = run(tmp_path, TORCH_WITH_GPU, SKIPPED + PASSES)
    assert status == 0
    assert "nothing ran" not in output


def test_a_test_that_ran_in_another_process_is_enough(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    # One process has nothing to run.
    status, output = run(tmp_path, TORCH_WITH_GPU, PASSES, "-p", "xdist", "-n", "2")
    assert (status, "1 passed" in output) == (0, True)
    assert "nothing ran" not in output


@pytest.mark.exhaustive
def test_a_test_of_another_folder_is_not(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_other.py").write_text(PASSES)
    (folder := tmp_path / "gpu").mkdir()
    status, output = run(folder, TORCH_WITH_GPU, SKIPPED, "-p", "xdist", "-n", "2", "--rootdir=..", "../test_other.py")
    assert (status, "1 passed, 2 skipped" in output) == (2, True)
    assert "gpu_tests: nothing ran: every test was skipped" in output


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    status, output = run(tmp_path, TORCH_WITH_GPU, "def test_d(): assert 0\n")
    assert status == 1
    assert "nothing ran" not in output


def test_collecting_needs_no_device(tmp_path: Path) -> None:
    status, output = run(tmp_path, TORCH_WITHOUT_GPU, PASSES, "--collect-only")
    assert status == 0
    assert "1 test collected" in output
