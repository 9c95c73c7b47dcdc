"""The timeline of a failing step: what the oracle expected beside what the engine did, the first difference marked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final, NamedTuple

from fuzz.report import place
from invariants import Relation, Verdict, all_invariants
from scenarios import Config, Context, Finding, Generation, Peer, Request, Scenario, Step, StepTrace, Substep, Violation

SCREEN: Final = 16
"""Most lines for the steps of a scenario."""
WIDTH: Final = 44
"""Most characters of a value."""
FIELDS_PER_SUBSTEP: Final = 6


class Line(NamedTuple):
    """A line of text; ``marked`` ones are what the reader should see first."""

    text: str
    marked: bool = False


class Entry(NamedTuple):
    """A field at a sub-step; None for a side that does not have it."""

    substep: str
    field: str
    expected: str | None
    actual: str | None
    differs: bool


def explain(finding: Finding, verdict: Verdict | None, name: str) -> Iterator[Line]:
    """The whole page: what failed, the scenario, the timeline. ``name`` is one that a person can use.

    Without a verdict, as when the process died, no step is known to have failed.
    """
    violation = finding.violation
    yield Line(f"{name}  {finding.invariant}")
    for invariant in all_invariants():
        if invariant.slug == finding.invariant:
            yield Line(f"    {invariant.statement}")
    seeded = "" if finding.bug is None else f", seeded defect {finding.bug}"
    seen_on = "" if finding.seen_on is None else f" ({finding.seen_on})"
    yield Line(f"    engine {finding.engine} on {finding.device}{seen_on}{seeded}")
    where = "" if verdict is None else f"{place(violation)}: "
    yield Line(f"    {where}{violation.message}", marked=True)
    if finding.raised_at is not None:
        yield Line(f"    raised at {finding.raised_at}")
    yield Line("")
    yield from scenario_lines(finding.scenario, None if verdict is None else violation.step)
    if verdict is not None:
        yield Line("")
        yield from _timeline(violation, verdict)


def recorded_lines(finding: Finding) -> Iterator[Line]:
    """What a finding says was wrong when it was found, for one that holds now."""
    violation = finding.violation
    seeded = "" if finding.bug is None else f", seeded defect {finding.bug}"
    yield Line(f"found on engine {finding.engine} on {finding.device}{seeded}: {finding.invariant}")
    yield Line(f"    {place(violation)}: {violation.message}")
    yield Line("")


def _prompt(request: Request) -> str:
    shared = "" if request.prefix_of is None else f", {request.prefix_len} of {request.prefix_of}"
    return f"{request.id} ({request.prompt_len}{shared}{', thinks' if request.thinking else ''})"


def scenario_lines(scenario: Scenario, failing: int | None = None) -> Iterator[Line]:
    """A scenario on at most a screen; the steps around the failing one are kept."""
    yield Line(f"scenario: {_config(scenario.config)}")
    if scenario.note:
        yield Line(f"  note: {' '.join(scenario.note.split())}")
    if scenario.requests:
        prompts = ", ".join(map(_prompt, scenario.requests))
        yield Line(f"  requests (prompt tokens): {prompts}")
    last = len(scenario.steps) if failing is None else failing + 1
    first = max(0, last - SCREEN)
    if first:
        yield Line(f"  ... {first} steps")
    for i, step in enumerate(scenario.steps[first : first + SCREEN], start=first):
        yield Line(f"{'>' if i == failing else ' '} steps[{i}] {_step(step)}", marked=i == failing)
    left = len(scenario.steps) - (first + SCREEN)
    if left > 0:
        yield Line(f"  ... {left} more steps")


def _config(config: Config) -> str:
    changed = [f for f in fields(config) if f.name != "worker" and getattr(config, f.name) != f.default]
    return " ".join([config.worker, *(f"{f.name}={getattr(config, f.name)}" for f in changed)])


def _step(step: Step) -> str:
    rows = [_context(row) for row in step.contexts] + [_generation(row) for row in step.generations]
    text = f"{step.phase.value} K={step.draft_len}: {', '.join(rows) or 'waits for the step before'}"
    if step.fault is not None:
        text += f"; fails at {step.fault}"
    if step.peers:
        text += f"; other ranks {', '.join(map(_peer, step.peers))}"
    if step.finish:
        text += f"; finishes {', '.join(map(str, step.finish))}"
    return text


def _peer(peer: Peer) -> str:
    parts = [f"contexts of {', '.join(map(str, peer.contexts))}"] if peer.contexts else []
    parts += [f"{peer.generations} generations"] if peer.generations else []
    return f"[{' and '.join(parts) or 'idle'}]"


def _context(row: Context) -> str:
    who = "dummy" if row.request is None else str(row.request)
    return f"context {who} ({', '.join([f'{row.chunk} tokens', *_agrees(row)])})"


def _generation(row: Generation) -> str:
    who = "dummy" if row.request is None else str(row.request)
    parts = [f"{row.past} cached", f"accepts {row.accept}"] if row.request is None else []
    parts += _agrees(row)
    if row.match:
        parts.append(f"automaton matches {row.match}")
    if row.verify is not None:
        parts.append(f"verifies {row.verify}")
    return f"generation {who}" + (f" ({', '.join(parts)})" if parts else "")


def _agrees(row: Context | Generation) -> Iterator[str]:
    if row.agree:
        yield f"drafts agree {row.agree}"
    if row.near:
        yield f"come close {row.near}"


def _timeline(violation: Violation, verdict: Verdict) -> Iterator[Line]:
    """The failing step, sub-step by sub-step; earlier steps in one line each."""
    steps = verdict.trace.steps
    for step in steps[: violation.step]:
        yield Line(f"steps[{step.index}] {step.phase.value}: {_outcome(step)}")
    if violation.step >= len(steps):
        yield Line(f"steps[{violation.step}] was not reached")
        return
    step = steps[violation.step]
    yield Line(f"steps[{step.index}] {step.phase.value}: {_outcome(step)}", marked=True)
    expected = verdict.expected.steps[violation.step] if violation.step < len(verdict.expected.steps) else None
    entries = [entry for substep in step.substeps for entry in _entries(substep, expected, violation)]
    if any(entry.field for entry in entries):
        relation = any(i.slug == violation.invariant and isinstance(i, Relation) for i in all_invariants())
        yield from _layout(entries, of_twin=relation)
    else:
        # Of a step that ended otherwise than in a twin, for instance; what is wrong is in the message.
        names = ", ".join(entry.substep for entry in entries)
        yield Line(f"  {names}: nothing that is shown differs from the reference")


def _outcome(step: StepTrace) -> str:
    failed = step.find("failed")
    if failed is None:
        return step.outcome
    how = "planned" if step.injected else "not planned"
    if failed.fields.get("raised_at"):
        how += f", raised at {failed.fields['raised_at']}"
    return f"{step.outcome}, {failed.fields.get('exception')} ({how}): {failed.fields.get('message')}"


def _entries(substep: Substep, expected: StepTrace | None, violation: Violation) -> Iterator[Entry]:
    """The field in question at this sub-step, and fields that differ from the oracle's."""
    said = None if expected is None else expected.find(*substep.key)
    theirs = {} if said is None else said.fields
    here = (violation.substep, violation.run) == substep.key
    name = substep.name if not substep.run else f"{substep.name} run {substep.run}"
    names = [f for f in substep.fields if f in theirs and theirs[f] != substep.fields[f] and f != violation.field]
    if violation.field is not None and violation.field in substep.fields:
        names.insert(0, violation.field)
    for field in names[:FIELDS_PER_SUBSTEP]:
        if here and field == violation.field:
            yield Entry(name, field, *_texts(violation.expected, violation.actual), True)
        elif field in theirs:
            differs = theirs[field] != substep.fields[field]
            yield Entry(name, field, *_texts(theirs[field], substep.fields[field]), differs)
        else:
            yield Entry(name, field, None, _cut(_json(substep.fields[field])), False)
    if len(names) > FIELDS_PER_SUBSTEP:
        yield Entry(name, f"and {len(names) - FIELDS_PER_SUBSTEP} more fields", None, None, True)
    if not names:
        yield Entry(name, "", None, None, False)


def _layout(entries: list[Entry], *, of_twin: bool) -> Iterator[Line]:
    head = Entry("sub-step", "field", "expected", "actual", False)
    widths = [max(len(str(entry[i] or "")) for entry in (head, *entries)) for i in range(3)]
    first = next((entry for entry in entries if entry.differs), None)
    before = None
    for entry in (head, *entries):
        mark = ">" if entry is first else "!" if entry.differs else " "
        substep = entry.substep if entry.substep != before else ""
        before = entry.substep
        cells = (substep, entry.field, entry.expected or "", entry.actual or "")
        text = "  ".join(str(cell).ljust(width) for cell, width in zip(cells, (*widths, 0)))
        yield Line(f"{mark} {text}".rstrip(), marked=entry is first)
    yield from _legend(entries, first, of_twin=of_twin)


def _legend(entries: list[Entry], first: Entry | None, *, of_twin: bool) -> Iterator[Line]:
    """What the marks mean, of those that are there."""
    meanings = ["expected, of the field in question: what the twin has, which may be the one at fault"] * of_twin
    if first is not None:
        meanings.append("> differs first")
    if any(entry.differs and entry is not first for entry in entries):
        meanings.append("! differs too")
    if any(" run " in entry.substep for entry in entries):
        meanings.append("run N: the forward is repeated on one preparation, as warm-up and capture of a graph do")
    if meanings:
        yield Line(f"({'; '.join(meanings)})")


def _texts(expected: Any, actual: Any) -> tuple[str, str]:
    """Both values; where one is cut, with the first place in which they differ."""
    texts = _json(expected), _json(actual)
    place = _first_difference(expected, actual)
    if place is None or max(map(len, texts)) <= WIDTH:
        return _cut(texts[0]), _cut(texts[1])
    path, one, other = place
    return _cut(texts[0], f" {path}: {_cut(one)}"), _cut(texts[1], f" {path}: {_cut(other)}")


def _first_difference(expected: Any, actual: Any) -> tuple[str, str, str] | None:
    """Path of the first entry in which two lists or objects differ, with both entries; None for other values."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        left, right = expected, actual
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        left, right = dict(enumerate(expected)), dict(enumerate(actual))
    else:
        return None
    for key in {**left, **right}:
        if key not in left or key not in right or left[key] != right[key]:
            both = (left.get(key), right.get(key))
            path, *values = _first_difference(*both) or (
                "",
                *(_json(d[key]) if key in d else "-" for d in (left, right)),
            )
            return f"[{key}]{path}", values[0], values[1]
    return None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _cut(text: str, after: str = "") -> str:
    return text + after if len(text) <= WIDTH else f"{text[: WIDTH - 3]}...{after}"
