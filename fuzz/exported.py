"""The text of an exported file: ``exported.py.in``, cut to what one finding needs, and its steps as literal data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from string import Template
from textwrap import TextWrapper
from typing import Any, Final

from faults.sites import TORCH, family
from fuzz.claim import DRAFT_CALLS, OBJECTS, Claim
from fuzz.explain import scenario_lines
from invariants import find
from museum import BUGS
from scenarios import Config, Fault, FaultKind, Finding, Phase, RowPlan, Step, walk
from scenarios.trace import FAILED

WIDTH: Final = 100
"""Longest line, as in upstream's own tests."""

SEAM_METHODS: Final = {
    "worker.sample_and_accept_draft_tokens": ("", "_accept_draft_tokens"),
    "worker.sample_draft_tokens": ("", "sample_draft_tokens"),
    "attn_metadata.prepare_for_spec_dec": ("Metadata", "prepare_for_spec_dec"),
    "attn_metadata.on_update": ("Metadata", "on_update"),
    "attn_metadata.update_for_spec_dec": ("Metadata", "update_for_spec_dec"),
    "draft_model.forward": ("DraftModel", "forward"),
    "draft_model.logits": ("DraftModel", "logits_processor"),
}
"""Seams that a worker's forward passes through, as class (the worker's where it is empty) and method of the file.

A version of a worker may verify drafts in a method of another name; all of them come to ``_accept_draft_tokens``.
"""
METADATA: Final = "TrtllmAttentionMetadata"
"""The metadata whose fields a file has, added to upstream's ``AttentionMetadata``."""
MODES: Final = {
    "Eagle3OneModelWorker": ("EAGLE3_ONE_MODEL", "Eagle3OneModelSpecMetadata"),
    "MTPEagleWorker": ("MTP_EAGLE_ONE_MODEL", "Eagle3OneModelSpecMetadata"),
    "DraftTargetOneModelWorker": ("DRAFT_TARGET_ONE_MODEL", "DraftTargetOneModelSpecMetadata"),
    "PARDWorker": ("PARD", "PARDSpecMetadata"),
}
"""Worker -> its mode and its metadata class."""
MODULES: Final = ("tensorrt_llm._torch.speculative.", "tensorrt_llm._torch.attention")
"""How the names of the modules begin whose calls of torch functions count."""
_MARKER: Final = re.compile(r"# \[([\w +-]+)\]\n")
"""A line of the template that says for what the lines after it are."""

Shown = tuple[int, Step, list[RowPlan]]
"""A step of the file: its index in the scenario, the step, and the lengths of its rows."""


def render(finding: Finding, claim: Claim, struck: Mapping[int, int]) -> str:
    """The file that makes ``claim``; ``struck`` says for each failing step which passage of its site raises."""
    config = finding.scenario.config
    # A replay runs none of the worker's Python, an iteration without rows runs nothing.
    shown = [
        (i, step, plans)
        for i, (step, plans) in enumerate(walk(finding.scenario))
        if i <= claim.step and step.rows and step.phase is not Phase.REPLAY
    ]
    sections = {config.worker, claim.kind, *_sections(claim, [step for _, step, _ in shown])}
    mode, spec_metadata = MODES[config.worker]
    invariant = claim.violation.invariant
    values = {
        "docstring": _docstring(finding, claim),
        # Room for the quotes at both ends.
        "statement": _wrapped(find(invariant).statement, " " * 7, " " * 4, WIDTH - 3).lstrip(),
        "worker": config.worker,
        "mode": mode,
        "spec_metadata": spec_metadata,
        "max_draft_len": config.max_draft_len,
        "max_total_draft_tokens": config.tokens_per_gen_step(config.max_draft_len) - 1,
        "max_num_requests": config.max_num_requests,
        "max_num_tokens": config.max_num_tokens,
        "graph_warmup_runs": config.graph_warmup_runs,
        "modules": _literal(MODULES),
        "steps": "".join(_steps(config, claim, shown, struck)),
        "test": f"test_{invariant.replace('-', '_')}",
        "in_draft": "len(input_ids)" if claim.field == DRAFT_CALLS else claim.read,
        "tensors": _literal(OBJECTS),
        "actual": claim.read if claim.in_draft is None else f"draft_model.seen[{claim.in_draft}]",
        "expected": _broken(f"    expected = {_literal(claim.expected)}").partition(" = ")[2],
        "place": claim.place,
        "field": claim.field,
    }
    return Template(_cut(sections)).substitute(values)


def _sections(claim: Claim, steps: list[Step]) -> Iterator[str]:
    """Which parts of the template are needed besides those of the worker and the kind of the claim."""
    for step in steps:
        if step.fault is not None:
            yield "torch-fault" if family(step.fault.site) == TORCH else "call-fault"
    yield "capture" if any(step.phase is Phase.CAPTURE for step in steps) else "no-capture"
    if claim.in_draft is not None or claim.field == DRAFT_CALLS:
        yield "in-draft"
    if claim.in_draft is not None or claim.field != "_saved_tensors":
        yield "saved"


def _cut(sections: set[str]) -> str:
    """The template without the lines of other sections: ``# [a b+c]`` begins one that is for a, and for b with c."""
    lines, kept = [], True
    for line in files("fuzz").joinpath("exported.py.in").read_text(encoding="utf-8").splitlines(keepends=True):
        marker = _MARKER.fullmatch(line)
        if marker:
            kept = marker[1] == "end" or any(sections.issuperset(name.split("+")) for name in marker[1].split())
        elif kept:
            lines.append(line)
    return "".join(lines)


def _docstring(finding: Finding, claim: Claim) -> str:
    """What the file shows and where it comes from."""
    worker, invariant = finding.scenario.config.worker, claim.violation.invariant
    seeded = "" if finding.bug is None else f" with defect {finding.bug} seeded"
    origin = f"Exported by specfuzz from finding {finding.id}, found on engine {finding.engine}{seeded}."
    if finding.engine != "tensorrt_llm":
        origin += " The file has not been run on TensorRT-LLM."
    if finding.invariant != invariant:
        origin += f" It is about {finding.invariant}; of that run, this is the first that a file of its own can see."
    kin = ", ".join(_kin(find(invariant).museum, worker))
    if kin:
        origin += f" Known bugs with this symptom: {kin}."
    steps = finding.scenario.steps[: claim.step + 1]
    lines = scenario_lines(replace(finding.scenario, steps=steps), claim.step)
    parts = [
        _wrapped(f"{worker} violates {invariant}."),
        _wrapped(origin),
        _wrapped(claim.message, "    ", "        "),
        "\n".join(_wrapped(line.text, "    ", "          ") for line in lines),
    ]
    return "\n\n".join(parts)


def _kin(entries: Iterable[str], worker: str) -> Iterator[str]:
    """Museum entries that were seeded into this worker, with the pull request of each."""
    for entry in entries:
        for bug in BUGS.values():
            if bug.worker == worker and bug.id.split("/")[0] == entry:
                number = re.search(r"#\d+", bug.reference)
                yield f"{entry} (PR {number[0]})" if number else entry
                break


def _wrapped(text: str, first: str = "", rest: str = "", width: int = WIDTH) -> str:
    """Lines of a docstring, indented; nothing in ``text`` can end it."""
    plain = "".join(c if c.isprintable() else "?" for c in text).replace("\\", "\\\\").replace('"', "'")
    return TextWrapper(
        width=width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    ).fill(plain)


def _steps(config: Config, claim: Claim, shown: Iterable[Shown], struck: Mapping[int, int]) -> Iterator[str]:
    """The list of steps, as Python."""
    yield "[\n"
    for index, step, plans in shown:
        yield f"    # steps[{index}]: {step.phase.value}\n"
        fields = {
            "draft_len": _literal(step.draft_len),
            "width": _literal(config.tokens_per_gen_step(step.draft_len)),
            "num_contexts": _literal(len(step.contexts)),
            "seq_lens": _literal([plan.query for plan in plans]),
            "cached": _literal([plan.past for plan in plans]),
            "accepted": _literal([1 if plan.is_context else plan.accepted for plan in plans]),
        }
        if step.fault is not None:
            fields["fault"] = _fault(config.worker, step.fault, struck[index])
            if step.fault.kind is FaultKind.OOM:
                fields["error"] = "torch.OutOfMemoryError"
        if step.phase is Phase.CAPTURE:
            stops = index == claim.step and claim.violation.substep != FAILED
            fields["graph_runs"] = _literal(claim.run + 1 if stops else config.graph_warmup_runs + 1)
        arguments = [f"{name}={value}" for name, value in fields.items()]
        line = f"    Step({', '.join(arguments)}),"
        if len(line) > WIDTH:
            broken = [_broken(f"        {argument},") for argument in arguments]
            line = "\n".join(["    Step(", *broken, "    ),"])
        yield line + "\n"
    yield "]"


def _fault(worker: str, fault: Fault, passage: int) -> str:
    if family(fault.site) == TORCH:
        return f'partial(FailingTorchCall, "{fault.site.partition(".")[2]}", {passage})'
    owner, method = SEAM_METHODS[fault.site]
    if owner == "DraftModel" and method != "forward":
        method = "shared_head" if worker == "MTPEagleWorker" else "logits_processor"
    return f'partial(failing_call, {owner or worker}, "{method}", {passage})'


def _literal(value: Any) -> str:
    """A value as the formatter writes it. Its strings are names."""
    return repr(value).replace("'", '"')


def _broken(line: str) -> str:
    """A line that ends with a list, one entry per line where it is too long."""
    begin, bracket, rest = line.partition("[")
    if len(line) <= WIDTH or not bracket:
        return line
    inner, _, end = rest.rpartition("]")
    indent = " " * (len(line) - len(line.lstrip()))
    entries = re.findall(r"\[.*?\]|[^,\s]+", inner)
    return "\n".join([f"{begin}[", *(f"{indent}    {entry}," for entry in entries), f"{indent}]{end}"])
