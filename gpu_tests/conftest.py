"""The GPU tests either ran or failed: a run without a CUDA device, or in which every test skipped, is an error.

pytest calls such a run a success, and so would ``tox -e gpu``.
"""

from __future__ import annotations

import pytest

EXIT_STATUS = 2
"""As everywhere in the suite: nothing was executed."""

_ran = pytest.StashKey[int]()


def _missing() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed; install the build for the CUDA version of this machine"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; run them on a machine with a GPU and its driver"
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    """End at once where no GPU test can run."""
    session.config.stash[_ran] = 0
    if not session.config.option.collectonly and (missing := _missing()):
        pytest.exit(f"gpu_tests: nothing ran: {missing}", returncode=EXIT_STATUS)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Count the tests whose body came to a verdict."""
    if call.when == "call" and not (call.excinfo and call.excinfo.errisinstance(pytest.skip.Exception)):
        item.config.stash[_ran] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn the success of a run in which nothing ran into a failure."""
    if _nothing_ran(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = EXIT_STATUS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say so."""
    if _nothing_ran(config):
        terminalreporter.write_line("gpu_tests: nothing ran: every test was skipped, deselected or never reached")


def _nothing_ran(config: pytest.Config) -> bool:
    return not config.option.collectonly and config.stash[_ran] == 0
