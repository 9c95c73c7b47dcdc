"""What a plain run of the tests leaves out: members of large parametrisations that repeat one mechanism.

    @pytest.mark.exhaustive(every=3, first=1)    keeps each third member, from the second on
    @pytest.mark.exhaustive(shows=function)      keeps a member that shows something which none before it did
    @pytest.mark.exhaustive                      keeps none: what it shows others show, in less time

``function`` is given a member's parameters by name, and says what they stand for: a worker, an invariant. A test that
loops asks the fixture ``part_of`` for a part of what it loops over. Properties are tried with fewer examples.

With ``--exhaustive`` everything is run, and so is whatever is named on the command line (``FILE::TEST``, ``-k``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
EXAMPLES: Final = 8
"""Of a property, instead of those that ``conftest.py`` says."""


class PartOf(Protocol):
    """The fixture ``part_of``."""

    def __call__(self, members: Sequence[T], every: int) -> Sequence[T]:
        """Each ``every``-th of the members, all of them in an exhaustive run."""
        ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="leave out no member of a large parametrisation")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exhaustive(every, first, shows): most members run with --exhaustive only")
    config.pluginmanager.register(LeftOut(config), "left-out")


class LeftOut:
    """Leaves members out, counts them, and says so when all is over; with xdist in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        named = any("::" in argument for argument in config.args) or config.getoption("keyword")
        self.exhaustive = bool(config.getoption("exhaustive") or named)
        if not self.exhaustive:
            settings.register_profile("plain", parent=settings.get_profile("tests"), max_examples=EXAMPLES)
            settings.load_profile("plain")
        self.tests = 0
        self.members = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.exhaustive:
            return
        families: dict[str, _Family] = defaultdict(_Family)
        kept, left_out = [], []
        for item in items:
            marker = item.get_closest_marker("exhaustive")
            keeps = marker is None or families[item.nodeid.partition("[")[0]].keeps(item, **marker.kwargs)
            (kept if keeps else left_out).append(item)
        items[:] = kept
        self.tests = len(left_out)
        config.hook.pytest_deselected(items=left_out)

    def part_of(self, members: Sequence[T], every: int) -> Sequence[T]:
        kept = members if self.exhaustive else members[::every]
        self.members += len(members) - len(kept)
        return kept

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = [self.tests, self.members]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        tests, members = getattr(node, "workeroutput", {}).get("left_out", (0, 0))
        # Every process collects all tests, and runs some.
        self.tests = max(self.tests, tests)
        self.members += members

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.tests or self.members:
            terminalreporter.write_line(
                f"left out: {self.tests} tests that repeat others, {self.members} members of loops in tests; "
                "`pytest --exhaustive` runs all"
            )


class _Family:
    """The members of one test that have been seen."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: set[Hashable] = set()

    def keeps(
        self, item: Any, *, every: int = 0, first: int = 0, shows: Callable[..., Iterable[Hashable]] | None = None
    ) -> bool:
        """Whether a plain run has the next member."""
        number = self.count
        self.count += 1
        if shows is None:
            return every > 0 and number % every == first
        new = set(shows(**item.callspec.params)) - self.shown
        self.shown |= new
        return bool(new)


@pytest.fixture(scope="session")
def part_of(request: pytest.FixtureRequest) -> PartOf:
    """A part of what a test loops over."""
    plugin: LeftOut = request.config.pluginmanager.get_plugin("left-out")  # type: ignore[assignment]
    return plugin.part_of
