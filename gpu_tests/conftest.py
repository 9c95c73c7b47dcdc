"""The GPU tests either ran or failed: a run without a CUDA device, or in which every test skipped, is an error.

pytest calls such a run a success, and so would ``tox -e gpu``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

EXIT_STATUS = 2
"""As everywhere in the suite: nothing was executed."""

_verdicts = pytest.StashKey["_Verdicts"]()


class _Verdicts:
    """Counts the tests of this folder whose body came to a verdict, here or in a process that xdist has started."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ended = report.when == "call" and (not report.skipped or hasattr(report, "wasxfail"))
        self.count += ended and (self._root / report.fspath).is_relative_to(Path(__file__).parent)


def _missing() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed; install the build for the CUDA version of this machine"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; run them on a machine with a GPU and its driver"
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Count where the whole run is overseen: a process that xdist has started may well be left without a test."""
    if not hasattr(config, "workerinput"):
        config.stash[_verdicts] = verdicts = _Verdicts(config.rootpath)
        config.pluginmanager.register(verdicts)


def pytest_sessionstart(session: pytest.Session) -> None:
    """End at once where no GPU test can run."""
    config = session.config
    if _verdicts in config.stash and not config.option.collectonly and (missing := _missing()):
        pytest.exit(f"gpu_tests: nothing ran: {missing}", returncode=EXIT_STATUS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn the success of a run in which nothing ran into a failure."""
    if _nothing_ran(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = EXIT_STATUS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say so."""
    if _nothing_ran(config):
        terminalreporter.write_line("gpu_tests: nothing ran: every test was skipped, deselected or never reached")


def _nothing_ran(config: pytest.Config) -> bool:
    return _verdicts in config.stash and not config.option.collectonly and config.stash[_verdicts].count == 0
