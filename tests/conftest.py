"""What holds for every test: one thread, no state left in the checkout, the same cases on every run."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from tests.left_out import part_of, pytest_addoption, pytest_configure

__all__ = ["part_of", "pytest_addoption", "pytest_configure"]

# Before torch is imported, and for the processes that tests start as well: the tests share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# With an explicit parent: under CI=true Hypothesis would otherwise take its own CI profile for one.
settings.register_profile(
    "tests",
    parent=settings.get_profile("default"),
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=50,
    print_blob=False,
)
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Leave what is loaded alone from now on: looking through it in vain takes a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_report_header() -> str:
    """Say in the first lines of the output whether the tests that need torch can run."""
    return f"torch: {'installed' if find_spec('torch') else 'not installed, tests that need it are skipped'}"


_numbers = count()


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def _state_in_tmp(_homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep findings and campaign state out of the checkout; few tests have any, so no folder is made ahead."""
    monkeypatch.setenv("SPECFUZZ_HOME", str(_homes / str(next(_numbers))))
