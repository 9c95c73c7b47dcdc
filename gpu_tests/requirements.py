"""What a run of the GPU tests has to have executed, and for which reasons one of them may skip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ONE_GPU: Final = "needs 2 GPUs"
"""Allowed as long as one is enough (``--require-gpus 1``)."""
NO_SUCH_OPTION: Final = "this torch has no such option"
NO_SOURCE: Final = "no source of TensorRT-LLM is given"
OLD_PYTHON: Final = "needs Python 3.12"
KNOWN_CRASH: Final = "known to crash"
_ALLOWED: Final = (NO_SUCH_OPTION, NO_SOURCE, OLD_PYTHON, KNOWN_CRASH)


def missing(gpus: int) -> str | None:
    """What this machine lacks to run any GPU test, None if nothing."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed; install the build for the CUDA version of this machine"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; run them on a machine with a GPU and its driver"
    if gpus > 1 and torch.cuda.device_count() < gpus:
        return f"--require-gpus {gpus}, and torch finds {torch.cuda.device_count()}; write that, or use another machine"
    return None


class Verdicts:
    """Counts the tests of a folder: those whose body came to a verdict, here or in a process of xdist, and skips."""

    def __init__(self, root: Path, folder: Path, gpus: int) -> None:
        self._root = root
        self._folder = folder
        self._allowed = _ALLOWED if gpus > 1 else (ONE_GPU, *_ALLOWED)
        self.executed = 0
        self.skipped: Counter[str] = Counter()
        """By reason."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a phase of a test."""
        if not (self._root / report.fspath).is_relative_to(self._folder):
            return
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[_reason(report.longrepr)] += 1
        elif report.when == "call":
            self.executed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a module that skips as a whole."""
        if report.skipped and (self._root / str(report.fspath)).is_relative_to(self._folder):
            self.skipped[_reason(report.longrepr)] += 1

    @property
    def lacking(self) -> int:
        """Tests that skipped for what the machine lacks."""
        return sum(count for reason, count in self.skipped.items() if not self._is_allowed(reason))

    @property
    def problem(self) -> str | None:
        """Why the run does not count, None if it does."""
        if not self.executed:
            return "nothing ran: every test was skipped, deselected or never reached"
        if self.lacking:
            return f"{self.lacking} skipped for what this machine lacks; see the table, or pass --no-require-gpu"
        return None

    def table(self) -> Iterator[str]:
        """Lines: what was executed, and what was skipped by reason."""
        yield f"{self.executed:6}  executed"
        for reason, count in sorted(self.skipped.items(), key=lambda item: (-item[1], item[0])):
            yield f"{count:6}  skipped{'' if self._is_allowed(reason) else ' (not allowed)'}: {reason}"

    def _is_allowed(self, reason: str) -> bool:
        return reason.startswith(self._allowed)


def _reason(longrepr: object) -> str:
    """The reason of a skip, out of what pytest makes of it."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")
