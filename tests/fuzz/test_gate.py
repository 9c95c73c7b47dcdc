"""The coverage gate bites: in a small repository of its own, on real coverage reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import gate as gate_module
from fuzz.gate import gate, main
from scenarios import UsageError

CONFIG = '[tool.coverage.run]\nsource_pkgs = ["room", "hall"]\n'
MEASURE = """
from coverage.cmdline import main
raise SystemExit(main(["run", "-m", "driver"]) or main(["xml", "-q", "--fail-under=0"]))
"""
TESTED = "def f(x):\n    if x:\n        return 1\n    return 2\n"


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(files: dict[str, str]) -> str:
    for path, text in files.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text)
    git("add", ".")
    git("commit", "-q", "-m", "change")
    return git("rev-parse", "HEAD")


def measure(code: str) -> None:
    """Run ``code`` under coverage and write coverage.xml, in one process."""
    Path("driver.py").write_text(code)
    subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True)


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first commit of a fresh repository, which is also the working directory."""
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    for name in [name for name in os.environ if name.startswith(("COVERAGE_", "GIT_"))]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "tester")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")
    git("init", "-q", "-b", "main")
    ignored = ".coverage\ncoverage.xml\ndriver.py\n__pycache__\n"
    files = {"room/__init__.py": "", "room/a.py": "A = 1\n", "hall/__init__.py": "", "hall/a.py": "A = 1\n"}
    return commit({"pyproject.toml": CONFIG, ".gitignore": ignored, **files})


def test_covered_lines_pass(base: str) -> None:
    commit({"room/a.py": TESTED})
    measure("import room.a; room.a.f(0); room.a.f(1)")
    result = gate(base)
    assert result.passed
    assert str(result) == f"gate: passed: tests run 4 of 4 changed lines (100.0%, 95% needed) (since {base})"


def test_a_file_that_is_left_out_of_the_measurement_is_not_judged(base: str) -> None:
    commit({"pyproject.toml": f'{CONFIG}omit = ["*/room/b.py"]\n', "room/a.py": TESTED, "room/b.py": TESTED})
    measure("import room.a; room.a.f(0); room.a.f(1)")
    result = gate(base)
    assert result.passed
    assert result.measured == 4


def test_an_untracked_link_to_a_folder_is_named(base: str) -> None:
    Path("link").symlink_to("room")
    with pytest.raises(UsageError, match=r"^link: is untracked and cannot be read \(Is a directory\); ignore it"):
        gate(base)


def test_a_changed_file_that_is_not_python_is_named(base: str) -> None:
    measure("import room.a")
    Path("room/broken.py").write_text("def f(:\n")
    os.utime("room/broken.py", (0, 0))  # as old as what a checkout brings
    with pytest.raises(UsageError, match=r"^room/broken\.py: is not Python \(.*\); repair it, or remove it$"):
        gate(base)


def test_an_uncovered_line_fails_and_is_named(base: str) -> None:
    commit({"room/a.py": TESTED})
    measure("import room.a; room.a.f(0)")
    result = gate(base)
    assert not result.passed
    assert result.uncovered == {"room/a.py": (3,)}
    assert str(result).splitlines() == [
        f"gate: failed: tests run 3 of 4 changed lines (75.0%, 95% needed) (since {base})",
        "  room/a.py: 3",
    ]
    assert gate(base, threshold=75).passed
    assert not gate(base, threshold=75.1).passed


@pytest.mark.exhaustive
def test_modules_of_one_name_are_told_apart(base: str) -> None:
    commit({"room/a.py": TESTED, "hall/a.py": "# why\n" + TESTED})
    measure("import room.a, hall.a; room.a.f(0); hall.a.f(1)")
    result = gate(base)
    assert result.measured == 8
    assert result.uncovered == {"hall/a.py": (5,), "room/a.py": (3,)}


@pytest.mark.exhaustive
def test_uncommitted_and_untracked_lines_count(base: str) -> None:
    Path("room/a.py").write_text(TESTED)
    Path("room/new.py").write_text("def g():\n    return 3\n")
    measure("import room.a, room.new; room.a.f(0)")
    assert gate(base).uncovered == {"room/a.py": (3,), "room/new.py": (2,)}


@pytest.mark.exhaustive
def test_a_changed_continuation_line_is_its_statement(base: str) -> None:
    call = "def f():\n    return max(\n        1,\n        {},\n    )\n"
    first = commit({"room/a.py": call.format(2)})
    commit({"room/a.py": call.format(3)})
    measure("import room.a")
    assert gate(first).uncovered == {"room/a.py": (2,)}


def test_no_report_gives_no_verdict(base: str) -> None:
    commit({"room/a.py": TESTED})
    with pytest.raises(UsageError, match=r"^coverage.xml: there is no such coverage report"):
        gate(base)


def test_a_report_older_than_the_sources_gives_no_verdict(base: str) -> None:
    commit({"room/a.py": TESTED})
    measure("import room.a; room.a.f(0); room.a.f(1)")
    os.utime("room/__init__.py", (2**32, 2**32))
    with pytest.raises(UsageError, match=r"coverage.xml: is older than room/__init__.py"):
        gate(base)


def test_a_broken_report_gives_no_verdict(base: str) -> None:
    commit({"room/a.py": TESTED})
    Path("coverage.xml").write_text("half a repo")
    with pytest.raises(UsageError, match=r"^coverage.xml: is not XML"):
        gate(base)


def test_a_file_that_the_report_does_not_know_fails(base: str) -> None:
    measure("import room.a")
    commit({"room/b.py": TESTED})
    os.utime("coverage.xml")
    result = gate(base)
    assert not result.passed
    assert result.unreported == {"room/b.py": (1, 2, 3, 4)}
    assert str(result).splitlines() == [
        f"gate: failed: 4 changed lines are not in the coverage report (since {base})",
        "  room/b.py: 1, 2, 3, 4",
    ]


@pytest.mark.exhaustive
def test_a_report_of_an_earlier_version_fails_although_other_lines_are_covered(base: str) -> None:
    commit({"room/a.py": TESTED})
    measure("import room.a; room.a.f(0); room.a.f(1)")
    commit({"room/a.py": TESTED + "B = 5\n"})
    os.utime("coverage.xml")
    assert gate(base).unreported == {"room/a.py": (5,)}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(
    "files",
    [{"README.md": "words"}, {"room/a.py": "# why\nA = 1\n"}, {"tests/test_a.py": "def test():\n    pass\n"}],
    ids=["docs", "comment", "unmeasured-package"],
)
def test_a_change_without_a_measured_line_passes_and_says_so(base: str, files: dict[str, str]) -> None:
    commit(files)
    measure("import room.a")
    result = gate(base)
    assert result.passed
    assert str(result) == f"gate: passed: no measured line changed (since {base})"


@pytest.mark.exhaustive
def test_a_removed_file_is_not_judged(base: str) -> None:
    commit({"room/b.py": TESTED})
    Path("room/b.py").unlink()
    measure("import room.a")
    assert gate(base).passed


def test_the_commit_under_test_is_no_base() -> None:
    measure("import room.a")
    with pytest.raises(UsageError, match="nothing was changed since HEAD"):
        gate("HEAD")


@pytest.mark.exhaustive
def test_lines_that_only_the_base_branch_changed_are_not_judged(base: str) -> None:
    git("checkout", "-q", "-b", "work")
    commit({"room/b.py": "B = 1\n"})
    git("checkout", "-q", "main")
    commit({"room/a.py": "A = 2\n"})
    git("checkout", "-q", "work")
    measure("import room.a, room.b")
    assert gate("main").measured == 1


@pytest.mark.parametrize("config", ["", "[tool.coverage.run]\nsource_pkgs = []\n"], ids=["absent", "empty"])
def test_without_measured_packages_there_is_no_verdict(base: str, config: str) -> None:
    commit({"pyproject.toml": config})
    with pytest.raises(UsageError, match=r"^coverage run.source_pkgs: is not configured"):
        gate()


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "find_spec", lambda name: None if name == "diff_cover" else name)
    with pytest.raises(UsageError, match=r"needs diff_cover.*pip install 'specfuzz\[gate\]'"):
        gate()


def test_the_default_base(base: str) -> None:
    release = commit({"room/a.py": "A = 2\n"})
    head = commit({"room/a.py": "A = 3\n"})
    assert gate_module.default_base() == base
    git("tag", "v1", release)
    git("tag", "v2", head)
    assert gate_module.default_base() == "v1"
    git("update-ref", "refs/remotes/origin/main", head)
    assert gate_module.default_base() == "v1"
    git("update-ref", "refs/remotes/origin/main", release)
    assert gate_module.default_base() == release


def test_exit_status_and_output(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    commit({"room/a.py": TESTED})
    measure("import room.a; room.a.f(0)")
    assert main([]) == 1
    assert main(["--base", base, "--threshold", "70"]) == 0
    capsys.readouterr()
    assert main(["--base", "nowhere"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "gate: --base: git knows no revision 'nowhere' with a history in common; name a branch, tag or commit\n"
    )


def test_outside_a_repository_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^git rev-parse HEAD: fatal: not a git repository"):
        gate()
