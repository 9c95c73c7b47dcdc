"""What README.md shows is what happens: its sessions are run, its other commands are at least understood."""

from __future__ import annotations

import doctest
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from fuzz.cli import app, invoke
from scenarios import WORKERS, FaultKind, Phase

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STATUS = '; echo "exit status $?"'


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def sessions() -> Iterator[tuple[str, str]]:
    """Commands of the console blocks in their order, each with the output that is shown for it."""
    for block in blocks("console"):
        for shown in block.split("\n$ "):
            command, _, output = shown.removeprefix("$ ").partition("\n")
            yield command, output.rstrip("\n") + "\n"


@pytest.mark.parametrize(("command", "output"), [pytest.param(*s, id=s[0]) for s in sessions()])
def test_session(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``...`` in the README stands for anything."""
    pytest.importorskip("torch")
    monkeypatch.chdir(ROOT)
    program, echo, after = command.partition(STATUS)
    assert after == ""
    name, *args = shlex.split(program)
    assert name == "specfuzz"
    status = invoke(args)
    shown = capsys.readouterr().out + (f"exit status {status}\n" if echo else "")
    matches = doctest.OutputChecker().check_output(output, shown, doctest.ELLIPSIS)
    assert matches, f"README shows\n{output}\nbut it is\n{shown}"
    assert echo or status == 0


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_command_is_understood(line: str) -> None:
    if "specfuzz " in line:
        name, *args = shlex.split(line.partition("specfuzz ")[2], comments=True)
        command = typer.main.get_command(app)
        context = command.make_context("specfuzz", [name, *args])
        _, subcommand, rest = command.resolve_command(context, [name, *args])  # type: ignore[attr-defined]
        subcommand.make_context(name, rest, parent=context)
    else:
        assert "tox" in line


@pytest.mark.exhaustive
def test_python_example(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    [source] = blocks("python")
    module = tmp_path / "test_example.py"
    module.write_text(source)
    [test] = [value for name, value in runpy.run_path(str(module)).items() if name.startswith("test_")]
    test()


def test_the_table_names_everything_that_is_verified() -> None:
    rows = {cells[1].strip(): cells[2] for line in README.splitlines() if len(cells := line.split("|")) == 4}
    assert re.findall(r"`(\w+)`", rows["workers"]) == list(WORKERS)
    assert re.findall(r"`(\w+)`", rows["phases"]) == [phase.value for phase in Phase]
    assert re.findall(r"`(\w+)`", rows["failures"]) == [kind.value for kind in FaultKind]


def test_files_and_links_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"examples/\w+\.json", README):
        assert (ROOT / target).exists(), target
