"""`pytest gpu_tests` cannot succeed without having run a test on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_tests.ledger import FILE, KnownFailure, apply, read
from gpu_tests.sampling import Sampled

ROOT = Path(__file__).parents[2]
CONFTEST = ROOT / "gpu_tests" / "conftest.py"
TORCH_WITH_GPU = (
    "__version__ = '0'\nclass cuda:\n"
    "    is_available = staticmethod(lambda: True)\n    device_count = staticmethod(lambda: 1)\n"
    "class arange:\n    def __init__(self, *_, **__): pass\n"
    "    def sum(self): return self\n    def item(self): return 6\n"
)
TORCH_WITHOUT_GPU = TORCH_WITH_GPU.replace("True", "False")
SKIPPED = (
    "import pytest\n@pytest.mark.skip(reason='needs 2 GPUs: one')\ndef test_a(): pass\n"
    "def test_b(): pytest.skip('needs 2 GPUs: one')\n"
)
LACKING = "import pytest\ndef test_e(): pytest.skip('no Tensor Cores')\n"
PASSES = "def test_c(): pass\n"


def run(folder: Path, torch: str, tests: str, *options: str) -> tuple[int, str]:
    (folder / "torch.py").write_text(torch)
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_gpu.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", *options, "."]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
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
        (TORCH_WITH_GPU, LACKING + PASSES, (), "gpu_tests: 1 skipped for what this machine lacks"),
        (TORCH_WITH_GPU, PASSES, ("--require-gpus=2",), "nothing ran: --require-gpus 2, and torch finds 1"),
    ],
    ids=["no-device", "no-torch", "all-skipped", "the-rest-deselected", "a-capability", "a-second-device"],
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
    assert "     1  executed\n     2  skipped: needs 2 GPUs: one\n" in output
    assert "nothing ran" not in output


MARKED = (
    "import pytest\n@pytest.mark.turns(3)\n@pytest.mark.parametrize('n', range(6))\ndef test_a(n): print('took', n)\n"
)


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize(
    ("options", "taken"),
    [(("--turn=1",), [1, 4]), (("--whole",), [0, 1, 2, 3, 4, 5]), (("-k", "test_a"), [0, 1, 2, 3, 4, 5])],
    ids=["a-turn", "whole", "a-part"],
)
def test_long_lists_are_taken_by_turns(tmp_path: Path, options: tuple[str, ...], taken: list[int]) -> None:
    _, output = run(tmp_path, TORCH_WITH_GPU, MARKED, "-s", *options)
    assert [n for n in range(6) if f"took {n}" in output] == taken


def test_in_so_many_turns_all_members_are_taken() -> None:
    for length in (0, 1, 7, 20):
        members = range(length)
        turns = [Sampled(turn)(members, 6) for turn in range(700, 704)]
        assert all(len(taken) <= 6 for taken in turns)
        assert sorted({n for taken in turns for n in taken}) == [*members]
        assert Sampled(5, whole=True)(members, 2) == [*members]


@pytest.mark.exhaustive
def test_nothing_is_required_where_that_is_asked_for(tmp_path: Path) -> None:
    status, output = run(tmp_path, TORCH_WITHOUT_GPU, LACKING, "--no-require-gpu")
    assert status == 0
    assert "     1  skipped (not allowed): no Tensor Cores\n" in output


LEDGER = """
[[known]]
test = "test_gpu.py::test_f*"
reference = "TensorRT-LLM #1"
reason = "it fails"
[[known]]
test = "test_gpu.py::test_g[1]"
reference = "#2"
reason = "it is lost"
crash = true
"""
KNOWN = (
    "import pytest, os\ndef test_f(): assert 0\ndef test_f_passes(): pass\n"
    "@pytest.mark.parametrize('n', [0, 1])\ndef test_g(n): os._exit(9) if n else None\n"
)


@pytest.mark.exhaustive
def test_known_failures_are_expected_and_crashes_not_launched(tmp_path: Path) -> None:
    (tmp_path / "known_failures.toml").write_text(LEDGER)
    status, output = run(tmp_path, TORCH_WITH_GPU, KNOWN)
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed" in output
    assert "[XPASS(strict)] TensorRT-LLM #1: it fails" in output
    assert "     3  executed\n     1  skipped: known to crash: #2: it is lost\n" in output
    assert status == 1


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("test = 'a'\nreason = 'b'", "known.toml: known[0]: reference is missing"),
        ("test = 'a'\nreason = 'b'\nreference = 'soon'", "known[0]: reference 'soon' names no issue"),
        ("test = 'a'\nreason = 'b'\nreference = '#1'\ncrashes = true", "known[0]: 'crashes' is not a field"),
        ("test = 'a'\nreason = 'b'\nreference = '#1'\ncrash = 1", "known[0]: crash is no bool"),
        ("test = ", "known.toml: "),
    ],
    ids=["no-reference", "no-number", "no-such-field", "no-bool", "no-toml"],
)
def test_an_entry_that_says_too_little_is_refused(tmp_path: Path, entry: str, complaint: str) -> None:
    (file := tmp_path / "known.toml").write_text(f"[[known]]\n{entry}\n")
    with pytest.raises(pytest.UsageError) as refused:
        read(file)
    assert complaint in str(refused.value)


def test_the_ledger_of_the_repository_can_be_read() -> None:
    assert read(ROOT / "gpu_tests" / FILE) == []


def test_an_entry_that_matches_nothing_is_found(request: pytest.FixtureRequest) -> None:
    stale = KnownFailure("test_gone.py::*", "#1", "it is gone")
    here = KnownFailure("test_gpu_run.py::test_no_such*", "#1", "nor this")
    assert apply([stale, here], [request.node], Path(__file__).parent) == [stale, here]


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    status, output = run(tmp_path, TORCH_WITH_GPU, "def test_d(): assert 0\n")
    assert status == 1
    assert "nothing ran" not in output


@pytest.mark.exhaustive
def test_a_device_that_computes_no_more_is_a_failure(tmp_path: Path) -> None:
    status, output = run(tmp_path, TORCH_WITH_GPU.replace("return 6", "return 0"), PASSES)
    assert (status, "1 passed, 1 error" in output) == (1, True)


def test_collecting_needs_no_device(tmp_path: Path) -> None:
    status, output = run(tmp_path, TORCH_WITHOUT_GPU, PASSES, "--collect-only")
    assert status == 0
    assert "1 test collected" in output
