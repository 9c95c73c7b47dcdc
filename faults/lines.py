"""Source lines as fault sites, reached by ``sys.monitoring`` (Python 3.12 or newer).

Events are set for the code objects under some folders only, so no other code is slowed; ``sys.settrace`` is left
alone, so coverage works as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import NamedTuple

from faults.bracket import Visitor
from faults.sites import line_site
from faults.source import fallible_lines, leaves_with, loaded_code, restore_lines
from scenarios.errors import UsageError

_TOOL_IDS = (4, 3, 5)
"""Ids 0 to 2 belong to debuggers, coverage and profilers; 3 is what Hypothesis takes when it is free."""
_PACKAGE = Path(__file__).resolve().parent


class Lines:
    """The line sites under ``roots`` (folders or files).

    Paths in site names are relative to ``base``, or to the root when there is none. Code that is loaded while
    ``monitor`` is active is not monitored.
    """

    def __init__(self, roots: Iterable[str | Path], base: str | Path | None = None) -> None:
        self._roots = tuple(Path(root).resolve() for root in roots)
        self._base = Path(base).resolve() if base is not None else None

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
        if not self._roots:
            raise UsageError("line sites are asked for, but this engine names no source folders; use seams")
        monitoring = sys.monitoring
        # New code comes with new modules.
        codes, names = _survey(self._roots, self._base, restoring, len(sys.modules))
        thread = get_ident()

        def on_line(code: CodeType, line: int) -> None:
            site = names[code.co_filename].get(line)
            if site is None or get_ident() != thread:
                return
            entering = not restoring and line in restore_lines(code.co_filename)[1]
            if entering and leaves_with(code, sys._getframe(1).f_lasti):
                return
            visit(site)

        tool = next((i for i in _TOOL_IDS if monitoring.get_tool(i) is None), None)
        if tool is None:
            raise UsageError(f"line sites need a free sys.monitoring tool id, {_TOOL_IDS} are taken; stop a tool")
        monitoring.use_tool_id(tool, "specfuzz")
        try:
            monitoring.register_callback(tool, monitoring.events.LINE, on_line)
            for code in codes:
                monitoring.set_local_events(tool, code, monitoring.events.LINE)
            yield
        finally:
            for code in codes:
                monitoring.set_local_events(tool, code, 0)
            monitoring.register_callback(tool, monitoring.events.LINE, None)
            monitoring.free_tool_id(tool)


class _Survey(NamedTuple):
    """The code objects under some roots, and file name -> line -> site."""

    codes: list[CodeType]
    names: dict[str, dict[int, str]]


@lru_cache(maxsize=8)
def _survey(roots: tuple[Path, ...], base: Path | None, restoring: bool, modules: int) -> _Survey:
    """Looks through all objects of the process, which takes longer than a step: once for so many ``modules``."""

    @cache
    def path_of(filename: str) -> str | None:
        return _site_path(Path(filename).resolve(), roots, base)

    codes = loaded_code(lambda filename: path_of(filename) is not None)
    names: dict[str, dict[int, str]] = {}
    for code in codes:
        lines = fallible_lines(code)
        if not restoring:
            lines -= restore_lines(code.co_filename)[0]
        path = path_of(code.co_filename)
        assert path is not None
        names.setdefault(code.co_filename, {}).update((line, line_site(path, line)) for line in lines)
    return _Survey(codes, names)


def _site_path(file: Path, roots: tuple[Path, ...], base: Path | None) -> str | None:
    """Path of a file in site names, None when it is not under the roots."""
    root = next((r for r in roots if file.is_relative_to(r)), None)
    if root is None or file.is_relative_to(_PACKAGE):
        return None
    return file.relative_to(base or (root if root.is_dir() else root.parent)).as_posix()
