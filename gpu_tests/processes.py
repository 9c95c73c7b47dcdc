"""Processes whose device may be lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 110
"""Most of a process; then it is ended, and the test with it."""


def ended(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process with these arguments, once it has ended; what it printed is text."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
