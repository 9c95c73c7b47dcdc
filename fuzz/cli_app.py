"""The group of all commands, and the options that several of them have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import typer.core

from engines.upstream import SOURCE_VARIABLE
from fuzz.files import HOME
from scenarios import UsageError, closest

PROGRAM: Final = "specfuzz"
OWN: Final = "own"
"""Stands for the defect that a file names itself."""


class Commands(typer.core.TyperGroup):
    """The group of all commands: an unknown one is answered with the closest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises ``UsageError`` for a name that no command has."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(f"COMMAND: no command is called {args[0]!r}; {closest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


class OptionalBug(typer.core.TyperCommand):
    """``--with-bug`` may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write ``OWN`` behind a ``--with-bug`` that no name follows."""
        filled: list[str] = []
        for arg, after in zip(args, [*args[1:], None]):
            filled.append(arg)
            if arg == "--with-bug" and (after is None or after.startswith("-") or Path(after).is_file()):
                filled.append(OWN)
        return super().parse_args(ctx, filled)


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    help="Hunts for departures of a speculative-decoding engine from its specification.",
    epilog=f"Findings and state are kept in .specfuzz, or in the folder that {HOME} names. "
    "Exit status: 0 nothing found; 1 findings; 2 usage, environment, or a run that proves nothing; "
    "141 nobody read the output to its end.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EngineOption = Annotated[
    str, typer.Option("--engine", metavar="NAME", help="portable, tensorrt_llm, or your own as module:Class.")
]
FoundArgument = Annotated[str, typer.Argument(metavar="ID|FILE", help="A finding or a scenario file.")]
FoundEngineOption = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="Engine to run on. [default: as found]")
]
FoundDeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="cpu or cuda. [default: as found]")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu or cuda.")]
WorkerOption = Annotated[
    list[str] | None, typer.Option("--worker", metavar="CLASS", help="Worker to test, repeatable. [default: all]")
]
InvariantOption = Annotated[
    list[str] | None, typer.Option("--invariant", metavar="SLUG", help="Invariant to ask, repeatable. [default: all]")
]
FaultsOption = Annotated[
    str,
    typer.Option(
        "--faults", metavar="FAMILIES", help="Where faults strike: seams, torch, lines, with commas; or none."
    ),
]
DraftLenOption = Annotated[
    int | None, typer.Option("--max-draft-len", metavar="N", help="Largest max_draft_len. [default: 7]")
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of what is drawn.")]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", help="Processes to search with. [default: one per core, if there is work]"),
]


def _use_source(path: Path | None) -> Path | None:
    if path is not None:
        os.environ[SOURCE_VARIABLE] = str(path)
    return path


SourceOption = Annotated[
    Path | None,
    typer.Option(
        "--trtllm-source",
        metavar="FOLDER",
        callback=_use_source,
        help="Checkout that the engine tensorrt_llm drives. [default: the installed package]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
ReportOption = Annotated[
    str | None,
    typer.Option("--report-dir", metavar="FOLDER", help="Folder in which to keep the report and the findings."),
]
