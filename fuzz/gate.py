"""The gate of a pull request: the lines that it changes are covered by tests.

diff-cover finds no fault when the coverage report and the diff have no line in common, and so a stale report, an
unmeasured file or a wrong path all look like success. Here every changed line that coverage.py would measure has
to be in the report; otherwise the gate fails, whatever the percentage.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from scenarios import UsageError

if TYPE_CHECKING:
    from diff_cover.violationsreporters.violations_reporter import XmlCoverageReporter

THRESHOLD = 95.0
"""Percentage of the changed lines that tests have to run."""

Lines = Mapping[str, tuple[int, ...]]
"""Line numbers by path, as in the working tree."""


@dataclass(frozen=True)
class GateResult:
    """The verdict over the lines changed since ``base``.

    measured    changed lines that the report knows
    uncovered   those among them that no test ran
    unreported  changed lines that coverage.py would measure and the report does not know
    """

    base: str
    threshold: float
    measured: int
    uncovered: Lines = field(default_factory=dict)
    unreported: Lines = field(default_factory=dict)

    @property
    def covered(self) -> int:
        """Measured lines that tests ran."""
        return self.measured - _count(self.uncovered)

    @property
    def passed(self) -> bool:
        """Whether the change may land."""
        return not self.unreported and 100 * self.covered >= self.threshold * self.measured

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        if self.unreported:
            text = f"{_count(self.unreported)} changed lines are not in the coverage report"
        elif self.measured:
            percent = floor(1000 * self.covered / self.measured) / 10
            text = f"tests run {self.covered} of {self.measured} changed lines ({percent}%, {self.threshold:g}% needed)"
        else:
            text = "no measured line changed"
        listed = sorted((self.unreported or self.uncovered).items())
        rows = [f"  {path}: {', '.join(map(str, numbers))}" for path, numbers in listed]
        return "\n".join([f"gate: {verdict}: {text} (since {self.base})", *rows])


def gate(
    base: str | None = None, threshold: float = THRESHOLD, coverage_xml: Path = Path("coverage.xml")
) -> GateResult:
    """Judge the lines changed since ``base``, uncommitted ones included.

    base          a revision that git knows; ``None`` takes ``default_base()``
    threshold     percentage of the changed lines that have to be covered
    coverage_xml  report of coverage.py over the present sources

    Works in the root of a checkout, where coverage.py finds its configuration; the packages judged are those of its
    ``run.source_pkgs``, but for files in ``run.omit``. Raises ``UsageError`` where no verdict can be given: an unknown
    base, a report that is missing or older than the sources.
    """
    for module in ("coverage", "diff_cover"):
        if find_spec(module) is None:
            raise UsageError(f"the gate needs {module}, which is not installed; pip install 'specfuzz[gate]'")
    if base is None:
        base = default_base()
    if not base:
        raise UsageError("--base: is empty; name a revision, or leave the option out")
    packages, omitted = _measured_packages()
    changed = _changed_lines(base)
    report = _report(coverage_xml, packages)
    measured, uncovered, unreported = 0, {}, {}
    for path, lines in changed.items():
        if not path.endswith(".py") or path.split("/")[0] not in packages or not Path(path).is_file():
            continue
        if any(Path(path).resolve().match(pattern) for pattern in omitted):
            continue
        judged = _statements(path, lines)
        known = judged & set(report.measured_lines(path) or ())
        measured += len(known)
        if missed := known & {violation.line for violation in report.violations(path)}:
            uncovered[path] = tuple(sorted(missed))
        if unknown := judged - known:
            unreported[path] = tuple(sorted(unknown))
    return GateResult(base, threshold, measured, uncovered, unreported)


def default_base() -> str:
    """Where the work under test began: where it left the remote's main branch.

    On that branch itself it is the last release, or the first commit while there is none.
    """
    head = _git("rev-parse", "HEAD")
    for branch in ("origin/HEAD", "origin/main"):
        fork = _git("merge-base", "HEAD", branch, default="")
        if fork and fork != head:
            return fork
    release = _git("describe", "--tags", "--abbrev=0", "HEAD^", default="")
    return release or _git("rev-list", "--max-parents=0", "HEAD").split()[0]


def _git(*args: str, default: str | None = None) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    if default is None:
        raise UsageError(f"git {' '.join(args)}: {done.stderr.strip() or 'failed'}")
    return default


def _measured_packages() -> tuple[frozenset[str], list[str]]:
    """The packages that are measured, and patterns of the files in them that are not."""
    import coverage  # as diff_cover below: needed by nothing but the gate

    settings = coverage.Coverage(data_file=None)
    source, omit = settings.get_option("run:source_pkgs"), settings.get_option("run:omit")
    if not isinstance(source, list) or not source:
        raise UsageError(
            "coverage run.source_pkgs: is not configured in this directory; run the gate in the root of a checkout"
        )
    return frozenset(map(str, source)), list(map(str, omit)) if isinstance(omit, list) else []


def _changed_lines(base: str) -> dict[str, set[int]]:
    from diff_cover.diff_reporter import GitDiffReporter
    from diff_cover.git_diff import GitDiffTool

    fork = _git("merge-base", base, "HEAD", default="")
    if not fork:
        raise UsageError(
            f"--base: git knows no revision {base!r} with a history in common; name a branch, tag or commit"
        )
    diff = GitDiffReporter(base, GitDiffTool("...", ignore_whitespace=False), include_untracked=True)
    try:
        changed = {path: set(diff.lines_changed(path)) for path in diff.src_paths_changed()}
    except OSError as error:  # of an untracked link to a folder, for instance
        raise UsageError(
            f"{error.filename}: is untracked and cannot be read ({error.strerror}); ignore it, or remove it"
        ) from error
    if not changed and fork == _git("rev-parse", "HEAD"):
        raise UsageError(f"--base: nothing was changed since {base}, so nothing is judged; name an earlier revision")
    return changed


def _report(coverage_xml: Path, packages: Iterable[str]) -> XmlCoverageReporter:
    from diff_cover.git_path import GitPathTool
    from diff_cover.violationsreporters.violations_reporter import XmlCoverageReporter

    if not coverage_xml.is_file():
        raise UsageError(f"{coverage_xml}: there is no such coverage report; run the tests under coverage first")
    sources = [source for package in packages for source in Path(package).rglob("*.py")]
    newest = max(sources, key=lambda source: source.stat().st_mtime, default=None)
    if newest and newest.stat().st_mtime > coverage_xml.stat().st_mtime:
        raise UsageError(f"{coverage_xml}: is older than {newest}; run the tests under coverage again")
    GitPathTool.set_cwd(None)
    try:
        return XmlCoverageReporter([ElementTree.parse(coverage_xml)])
    except ElementTree.ParseError as error:
        raise UsageError(f"{coverage_xml}: is not XML ({error}); write it with `coverage xml`") from error


def _statements(path: str, lines: set[int]) -> set[int]:
    """First lines of the statements that ``lines`` belong to, without what the configuration excludes."""
    import coverage
    from coverage.exceptions import NotPython
    from coverage.python import PythonFileReporter

    source = PythonFileReporter(str(Path(path).resolve()), coverage.Coverage(data_file=None))
    try:
        return source.lines() & source.translate_lines(lines)
    except NotPython as error:
        raise UsageError(f"{path}: is not Python ({error}); repair it, or remove it") from error


def _count(lines: Lines) -> int:
    return sum(map(len, lines.values()))


def main(argv: list[str] | None = None) -> int:
    """``python -m fuzz.gate``: print the verdict; 0 passed, 1 failed, 2 no verdict."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.gate", description="Are the changed lines covered by tests?")
    parser.add_argument("--base", help="revision to compare with (default: where the work left the main branch)")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="percentage needed (default: %(default)s)")
    parser.add_argument("--coverage-xml", type=Path, default=Path("coverage.xml"), help="default: %(default)s")
    options = parser.parse_args(argv)
    try:
        result = gate(options.base, options.threshold, options.coverage_xml)
    except UsageError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    print(result)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
