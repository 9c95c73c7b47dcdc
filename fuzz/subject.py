"""What a person can ask to see again: a scenario file, an example with a story, or a finding."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import fuzz.engines
import invariants
from fuzz.audit import PROCESS_SURVIVES
from fuzz.store import Store
from scenarios import Finding, Scenario, ScenarioError, UsageError, closest, finding_from_json, scenario_from_json
from scenarios.codec import parse

_LONGEST_NAME: Final = 255
"""Bytes of the name of a file, in the usual file systems."""
_LARGEST_MIB: Final = 64
"""Size from which on a file is not read: a finding has some kilobytes."""
_WRAPPER = ("title", "story", "engine", "device", "bug", "scenario")
_KNOWN: Final = (*_WRAPPER, "version", *(each.name for each in fields(Scenario)))
"""Names at the top of a scenario's file, with a story or without."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A scenario and under which conditions to run it.

    name      id or path, as it was asked for
    bug       seeded defect that it is about; ``seeded`` says whether to seed it
    finding   what was found in it, None for a scenario of which nothing is claimed
    path      file that it was read from
    """

    name: str
    scenario: Scenario
    engine: str = fuzz.engines.PORTABLE
    device: str = "cpu"
    bug: str | None = None
    seeded: bool = False
    finding: Finding | None = None
    title: str = ""
    story: str = ""
    path: Path | None = field(default=None, compare=False)

    @property
    def active_bug(self) -> str | None:
        """The defect to seed, None for the engine as it is."""
        return self.bug if self.seeded else None

    def on(self, engine: str | None, device: str | None, *, bug: str | None = None, seed_bug: bool = False) -> Subject:
        """The same on another engine or device, where given; with ``seed_bug`` under ``bug``, or its own defect."""
        if seed_bug and bug is None and self.bug is None:
            raise UsageError(f"--with-bug: {self.name} names no defect; write one, see `specfuzz list bugs`")
        if engine is None and self.engine not in fuzz.engines.ENGINES:
            # Loading it would run code that whoever sent the file has chosen.
            raise UsageError(
                f"{self.name}: engine: {self.engine!r} is not one of this suite's; "
                f"write --engine {self.engine} if you trust it"
            )
        subject = replace(
            self,
            engine=self.engine if engine is None else engine,
            device=self.device if device is None else device,
            bug=self.bug if bug is None else bug,
            seeded=self.seeded or seed_bug,
        )
        try:
            fuzz.engines.check_name(subject.engine, subject.device)
        except UsageError as error:
            own = device is None and self.device not in fuzz.engines.DEVICES
            raise UsageError(f"{self.name}: {str(error).removeprefix('--')}" if own else str(error)) from None
        return subject


def find_subject(name: str, store: Store) -> Subject:
    """The file of that path, or the stored finding of that id; ``UsageError`` if it is neither."""
    if not name:
        raise UsageError("ID|FILE: is empty; name a JSON file or the id of a finding")
    path = Path(name)
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise UsageError(f"{name[:40]}...: is too long for a name; name a JSON file or the id of a finding")
    if not (path.exists() or path.suffix == ".json" or "/" in name):
        path = store.find(name)
    return read_subject(path, name)


def read_subject(path: Path, name: str | None = None) -> Subject:
    """The subject in a file; ``ScenarioError`` names the file and the field that does not fit."""
    name = name or str(path)
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: is no file; name a JSON file or the id of a finding")
        if path.exists() and (mib := path.stat().st_size // 2**20) >= _LARGEST_MIB:
            raise UsageError(f"{path}: has {mib} MiB, which is too much; name one of less than {_LARGEST_MIB} MiB")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise UsageError(f"{path}: cannot be read ({reason}); name a JSON file or the id of a finding") from error
    try:
        return replace(_subject(name, parse(text, "")), path=path)
    except ScenarioError as error:
        place = f"{path}: {error.field}" if error.field else str(path)
        raise ScenarioError(place, error.problem, error.remedy) from None


def _subject(name: str, value: dict[str, Any]) -> Subject:
    if "violation" in value or "invariant" in value:
        found = finding_from_json(value)
        if found.invariant != PROCESS_SURVIVES:
            invariants.find(found.invariant)
        return Subject(
            name=name,
            scenario=found.scenario,
            engine=found.engine,
            device=found.device,
            bug=found.bug,
            seeded=found.bug is not None,
            finding=found,
        )
    if "scenario" not in value:
        if unknown := [key for key in value if key not in _KNOWN]:
            raise ScenarioError(unknown[0], "is not a field", closest(unknown[0], _KNOWN))
        if told := [key for key in _WRAPPER if key in value]:
            raise ScenarioError("scenario", "is missing", f"add it beside {told[0]!r}, with the scenario in it")
        return Subject(name=name, scenario=scenario_from_json(value))
    texts: dict[str, Any] = {}
    for key, content in value.items():
        if key not in _WRAPPER:
            raise ScenarioError(key, "is not a field", closest(key, _WRAPPER))
        if key != "scenario":
            if not isinstance(content, str):
                raise ScenarioError(key, "is not a text", "write a text")
            texts[key] = content
    if not isinstance(value["scenario"], dict):
        raise ScenarioError("scenario", "is not an object", "write an object")
    try:
        scenario = scenario_from_json(value["scenario"])
    except ScenarioError as error:
        raise error.within("scenario") from None
    return Subject(name=name, scenario=scenario, **texts)
