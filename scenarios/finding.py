"""A finding: a shrunk scenario, the invariant it violates and the first difference seen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from scenarios.codec import check_version, from_json, parse, scenario_to_json, to_json
from scenarios.errors import ScenarioError
from scenarios.model import FORMAT_VERSION, Scenario
from scenarios.schedule import check


@dataclass(frozen=True, kw_only=True)
class Violation:
    """Where a trace departs from what an invariant asks for.

    step, substep, run  place; substep is None when the whole step or run is meant
    field               upstream's name of the field, None when none is meant
    expected, actual    JSON values
    message             one sentence
    """

    invariant: str
    step: int
    substep: str | None = None
    run: int = 0
    field: str | None = None
    expected: Any = None
    actual: Any = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A violation with all that is needed to see it again.

    engine, device  what ran; ``bug`` is the seeded defect that was active, None for the engine as it is
    raised_at       file:line of the first exception that was not planned, if there was one
    seen_on         "CPU and GPU" or "GPU only" for what was found on a GPU, else None
    """

    invariant: str
    engine: str
    device: str
    scenario: Scenario
    violation: Violation
    bug: str | None = None
    raised_at: str | None = None
    seen_on: str | None = None

    @property
    def id(self) -> str:
        """Short and stable: the same scenario violating the same invariant on the same engine has the same id."""
        text = json.dumps([self.engine, self.bug, self.invariant, scenario_to_json(self.scenario)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """JSON object of a finding, with its id and the format version."""
    value = {"version": FORMAT_VERSION, "id": finding.id, **to_json(finding)}
    value["scenario"] = scenario_to_json(finding.scenario)
    return value


def finding_from_json(value: dict[str, Any]) -> Finding:
    """The finding in a JSON object; ``ScenarioError`` names what does not fit. The id is recomputed."""
    rest = check_version(value)
    rest.pop("id", None)
    scenario = rest.get("scenario")
    if isinstance(scenario, dict):
        try:
            rest["scenario"] = check_version(scenario)
        except ScenarioError as error:
            raise error.within("scenario") from None
    finding = from_json(Finding, rest)
    try:
        check(finding.scenario)
    except ScenarioError as error:
        raise error.within("scenario") from None
    return finding


def finding_loads(text: str) -> Finding:
    """The finding in a JSON text; ``ScenarioError`` otherwise."""
    return finding_from_json(parse(text, "finding"))
