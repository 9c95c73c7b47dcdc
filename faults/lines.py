"""Source lines as fault sites, reached by ``sys.monitoring`` (Python 3.12 or newer).

Every line reports itself once; those that are no sites are switched off at once, so other code is hardly slowed.
``sys.settrace`` is left alone, so coverage works as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any

from faults.bracket import Visitor
from faults.sites import line_site
from faults.source import fallible_lines, leaves_with, restore_lines
from scenarios.errors import UsageError

_TOOL_IDS = (4, 3, 5)
"""Ids 0 to 2 belong to debuggers, coverage and profilers; 3 is what Hypothesis takes when it is free."""
_PACKAGE = Path(__file__).resolve().parent


class Lines:
    """The line sites under ``roots`` (folders or files).

    Paths in site names are relative to ``base``, or to the root when there is none.
    """

    def __init__(self, roots: Iterable[str | Path], base: str | Path | None = None) -> None:
        self._given = tuple(roots), base
        self._paths: dict[str, str | None] = {}

    @cached_property
    def _places(self) -> tuple[tuple[Path, ...], Path | None]:
        """Roots and base. Found when they are asked for: each session has them, few monitor any line."""
        roots, base = self._given
        return tuple(Path(root).resolve() for root in roots), None if base is None else Path(base).resolve()

    @contextmanager
    def monitor(self, visit: Visitor, *, restoring: bool = False) -> Iterator[None]:
        """Call ``visit`` ahead of each line of this thread that can raise; what it raises surfaces at that line.

        restoring  whether lines of restore code are sites too

        Raises ``UsageError`` before Python 3.12, without roots and when no tool id is free.
        """
        if sys.version_info < (3, 12):
            raise UsageError(
                f"line sites need Python 3.12 or newer, this is {sys.version_info[0]}.{sys.version_info[1]}; "
                "use seams or torch sites"
            )
        if not self._given[0]:
            raise UsageError("line sites are asked for, but this engine names no source folders; use seams")
        monitoring = sys.monitoring
        thread = get_ident()
        # By identity: code objects compare by content, slowly. Each is kept, so that its id stays its own.
        surveyed: dict[int, tuple[CodeType, dict[int, str]]] = {}

        def on_line(code: CodeType, line: int) -> Any:
            """Visit the site of a line that is about to run; a line that is none is not reported again."""
            known = surveyed.get(id(code))
            if known is None:
                known = surveyed[id(code)] = code, self._sites(code, restoring)
            site = known[1].get(line)
            if site is None:
                return monitoring.DISABLE
            if get_ident() != thread:
                return None
            entering = not restoring and line in restore_lines(code.co_filename)[1]
            if not (entering and leaves_with(code, sys._getframe(1).f_lasti)):
                visit(site)
            return None

        tool = next((i for i in _TOOL_IDS if monitoring.get_tool(i) is None), None)
        if tool is None:
            raise UsageError(f"line sites need a free sys.monitoring tool id, {_TOOL_IDS} are taken; stop a tool")
        monitoring.use_tool_id(tool, "specfuzz")
        try:
            monitoring.register_callback(tool, monitoring.events.LINE, on_line)
            # Lines that another set of roots had switched off report again.
            monitoring.restart_events()
            monitoring.set_events(tool, monitoring.events.LINE)
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, monitoring.events.LINE, None)
            monitoring.free_tool_id(tool)

    def _sites(self, code: CodeType, restoring: bool) -> dict[int, str]:
        """Line -> site of the lines of ``code`` that can raise; none when it is not under the roots."""
        file = code.co_filename
        if file not in self._paths:
            self._paths[file] = _site_path(Path(file).resolve(), *self._places)
        path = self._paths[file]
        if path is None:
            return {}
        lines = fallible_lines(code)
        if not restoring:
            lines -= restore_lines(file)[0]
        return {line: line_site(path, line) for line in lines}


def _site_path(file: Path, roots: tuple[Path, ...], base: Path | None) -> str | None:
    """Path of a file in site names, None when it is not under the roots."""
    root = next((r for r in roots if file.is_relative_to(r)), None)
    if root is None or file.is_relative_to(_PACKAGE):
        return None
    return file.relative_to(base or (root if root.is_dir() else root.parent)).as_posix()
