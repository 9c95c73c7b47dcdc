"""What the examples say of themselves: each holds on the engine as it is, and fails with the bug that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.cli import invoke

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.json"))


def test_readme_names_each() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"examples/{path.name}" not in readme] == []


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_fails_with_its_bug_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert invoke(["replay", str(path)]) == 0
    assert invoke(["replay", str(path), "--with-bug"]) == 1
    assert f"{path}: fails" in capsys.readouterr().out
