"""The resolved values of the profiles, also under ``CI=1``, where Hypothesis changes its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scenarios import UsageError
from strategies.profiles import PROFILES, load_profile

SHOW = """
import json
from hypothesis import Phase, settings
from strategies.profiles import PROFILES, load_profile

shown = {}
for name in PROFILES:
    load_profile(name)
    s = settings()
    shown[name] = {
        "derandomize": s.derandomize,
        "database": getattr(s.database, "path", s.database) and str(s.database.path),
        "deadline": s.deadline,
        "max_examples": s.max_examples,
        "explain": Phase.explain in s.phases,
        "step_count": s.stateful_step_count,
    }
print(json.dumps(shown))
"""


def resolved(**environment: str) -> dict[str, dict[str, Any]]:
    """Values of each profile in a fresh process."""
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "GITHUB_ACTIONS", "SPECFUZZ_HOME")}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**clean, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, Any]] = json.loads(shown.stdout)
    return found


@pytest.mark.parametrize("ci", [{}, {"CI": "1"}], ids=["terminal", "CI=1"])
def test_values(ci: dict[str, str], tmp_path: Path) -> None:
    shown = resolved(SPECFUZZ_HOME=str(tmp_path), **ci)
    assert tuple(shown) == PROFILES
    random, bounded, nightly = (shown[name] for name in PROFILES)
    database = str(tmp_path / "hypothesis")
    assert [p["derandomize"] for p in (random, bounded, nightly)] == [False, True, False]
    assert [p["database"] for p in (random, bounded, nightly)] == [database, None, database]
    assert [p["max_examples"] for p in (random, bounded, nightly)] == [200, 300, 20_000]
    for profile in (random, bounded, nightly):
        assert profile["deadline"] is None
        assert profile["explain"] is False
        assert profile["step_count"] == 20


def test_without_specfuzz_home_the_database_is_in_the_working_directory() -> None:
    assert resolved()["specfuzz"]["database"] == os.path.join(".specfuzz", "hypothesis")


def test_an_unknown_profile_gets_the_closest() -> None:
    with pytest.raises(UsageError, match=r"^profile: 'specfuz-ci' does not exist; did you mean 'specfuzz-ci'\?$"):
        load_profile("specfuz-ci")
