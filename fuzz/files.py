"""Writing files: in one piece, with an error that says what to change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from scenarios import UsageError

HOME: Final = "SPECFUZZ_HOME"
"""Names the folder of all state; ``.specfuzz`` without it."""


def write_text(path: Path, text: str, setting: str) -> None:
    """Write a file so that it is whole or absent whenever the process ends; ``UsageError`` names ``setting``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise not_writable(setting, path.parent, error) from error


def not_writable(setting: str, folder: Path, error: OSError) -> UsageError:
    """What to tell a person whose folder cannot be written; ``setting`` is where they named it."""
    return UsageError(f"{setting}: {folder} cannot be written ({error.strerror}); name a folder that can")
