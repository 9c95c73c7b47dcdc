"""The GPU tests either ran or failed: without a CUDA device, or with something left out, a run exits 2.

pytest calls such a run a success, and so would ``tox -e gpu``. ``--no-require-gpu`` leaves it at that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Final

import pytest

from gpu_tests import ledger
from gpu_tests.requirements import Verdicts, missing
from gpu_tests.sampling import Sampled

EXIT_STATUS: Final = 2
"""As everywhere in the suite: what was to be executed was not."""
FOLDER: Final = Path(__file__).parent

LONGEST: Final = ("test_long_run.py", "test_two_gpus.py")
"""Modules with a single test of a minute or more."""

_verdicts = pytest.StashKey[Verdicts]()


@pytest.fixture(autouse=True)
def _device_survives() -> Iterator[None]:
    """After each test the device still computes."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        assert torch.arange(4, device="cuda").sum().item() == 6


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of these tests."""
    group = parser.getgroup("gpu_tests")
    group.addoption(
        "--require-gpu", action="store_true", dest="require_gpu", default=True, help="exit 2 if tests did not run [on]"
    )
    group.addoption("--no-require-gpu", action="store_false", dest="require_gpu", help="leave it to pytest")
    group.addoption(
        "--require-gpus", type=int, default=1, metavar="N", help="so many: with 2, none may skip for want of a second"
    )
    group.addoption("--whole", action="store_true", help="take all members of long lists, and not some of them")
    group.addoption("--turn", type=int, metavar="N", help="which members to take otherwise [another N every day]")


def pytest_configure(config: pytest.Config) -> None:
    """Count where the whole run is overseen: a process that xdist has started may well be left without a test."""
    if config.option.turn is None:
        # Here, so that the processes of xdist, which are given these options, all take the same ones.
        config.option.turn = date.today().toordinal()
    if not hasattr(config, "workerinput"):
        gpus = config.getoption("--require-gpus")
        config.stash[_verdicts] = verdicts = Verdicts(config.rootpath, FOLDER, gpus)
        config.pluginmanager.register(verdicts)


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is taken of long lists."""
    if config.option.whole:
        return "gpu_tests: all members of long lists"
    return f"gpu_tests: of long lists the members of --turn {config.option.turn}; --whole takes all"


@pytest.fixture(scope="session")
def sampled(pytestconfig: pytest.Config) -> Sampled:
    """Takes what this run is to take of a long list."""
    return Sampled(pytestconfig.option.turn, pytestconfig.option.whole)


def pytest_sessionstart(session: pytest.Session) -> None:
    """End at once where no GPU test can run."""
    config = session.config
    if _is_required(config) and (lack := missing(config.getoption("--require-gpus"))):
        pytest.exit(f"gpu_tests: nothing ran: {lack}", returncode=EXIT_STATUS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the ledger knows, and take the members of this turn.

    An entry without a test is an error, unless only a part was asked for. Of a part all members are taken. What takes
    longest comes first, so that no process is left alone with it in the end.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    unused = ledger.apply(ledger.read(FOLDER / ledger.FILE), items, FOLDER)
    options = config.option
    whole = not (options.keyword or options.markexpr or options.deselect or options.ignore)
    if unused and whole and [Path(argument).resolve() for argument in config.args] == [FOLDER]:
        raise pytest.UsageError(f"{ledger.FILE}: {unused[0].test!r} matches no test; remove the entry")
    if not options.keyword and not any("::" in argument for argument in config.args):
        items[:], left_out = Sampled(options.turn, options.whole).thin(items)
        config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn the success of a run that left something out into a failure."""
    if _problem(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = EXIT_STATUS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what ran, what did not, and why."""
    if not _is_counted(config):
        return
    terminalreporter.section("GPU tests")
    for line in config.stash[_verdicts].table():
        terminalreporter.write_line(line)
    if problem := _problem(config):
        terminalreporter.write_line(f"gpu_tests: {problem}")


def _is_counted(config: pytest.Config) -> bool:
    return _verdicts in config.stash and not config.option.collectonly


def _is_required(config: pytest.Config) -> bool:
    return _is_counted(config) and bool(config.option.require_gpu)


def _problem(config: pytest.Config) -> str | None:
    return config.stash[_verdicts].problem if _is_required(config) else None
