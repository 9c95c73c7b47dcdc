"""Writing files: in one piece, with an error that says what to change."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from scenarios import UsageError

HOME: Final = "SPECFUZZ_HOME"
"""Names the folder of all state; ``.specfuzz`` without it."""


def unique() -> str:
    """A name for a file that nobody else takes. Containers that share a folder have the same process ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def write_text(path: Path, text: str, setting: str) -> None:
    """Write a file so that it is whole or absent whenever the process ends; ``UsageError`` names ``setting``."""
    temporary = path.with_name(f".{unique()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise not_writable(setting, path.parent, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def check_writable(folder: Path, setting: str) -> None:
    """Make the folder; raise ``UsageError``, which names ``setting``, unless files can be made in it."""
    probe = folder / f".{unique()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise not_writable(setting, folder, error) from error


def json_files(folder: Path) -> list[Path]:
    """The JSON files in a folder of the state, by name; none if there is no such folder."""
    return [path for path in visible(folder) if path.name.endswith(".json")]


def visible(folder: Path) -> list[Path]:
    """What is in a folder of the state, by name, but for files that are being written, which begin with a dot.

    Raises ``UsageError`` for a folder that cannot be read, where ``Path.glob`` finds nothing.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"{HOME}: {folder} cannot be read ({error.strerror}); make it readable, or name another folder"
        ) from error
    return [folder / name for name in names if not name.startswith(".")]


def not_writable(setting: str, folder: Path, error: OSError) -> UsageError:
    """What to tell a person whose folder cannot be written; ``setting`` is where they named it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space, or name another folder" if full else "name a folder that can"
    return UsageError(f"{setting}: {folder} cannot be written ({error.strerror}); {remedy}")
