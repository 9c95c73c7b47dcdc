"""A finding as a stand-alone pytest file in the style of upstream's unit tests.

The file needs tensorrt_llm, pytest and torch, and nothing of the suite. It builds the real worker and metadata,
prepares each batch of the scenario, lets fail what fails in it, and asserts what the violated invariant says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import fuzz.engines
from engines.base import SEAMS, TORCH, run
from faults.sites import family
from fuzz import exported
from fuzz.claim import Claim, claims
from fuzz.replay import Replay, replay
from fuzz.subject import Subject
from invariants import Verdict, find
from museum import seeded
from scenarios import BACKENDS, Config, Fault, Finding, Scenario, UsageError, closest
from scenarios.acceptance import VARIANTS

_LISTED: Final = 8
"""Fields that are named; more of them are counted."""
_FIRST: Final = "worker.sample_and_accept_draft_tokens"
"""What a worker does first."""
_SHARED: Final = "attn_metadata.on_update"
"""The one seam that is called outside the worker's forward too."""

_LEFT_OUT: Final = tuple(name for name in VARIANTS if name != "enable_block_reuse")
"""Ways to draft and to accept that a file does not go. Block reuse is known to it, as tokens cached before a prompt."""


def export(subject: Subject, invariant: str | None = None) -> str:
    """Text of the file.

    invariant  slug of the one to show; default: that of the finding, else the first that is violated

    Raises ``UsageError``, which says in one line why there is no file and what to use instead.
    """
    config = subject.scenario.config
    if config.worker not in exported.MODES:
        raise _cannot(subject, f"a file can drive {', '.join(exported.MODES)}, not {config.worker}")
    metadata = BACKENDS[config.attention_backend].metadata
    if metadata != exported.METADATA:
        raise _cannot(subject, f"a file can set the fields of {exported.METADATA}, not those of {metadata}")
    for variant in _LEFT_OUT:
        if getattr(config, variant) != getattr(Config, variant):
            raise _cannot(subject, f"config.{variant} is set, and a file leaves out {', '.join(_LEFT_OUT)}")
    done = replay(subject)
    if done.unsound is not None:
        raise UsageError(f"{subject.name}: {done.unsound.message}; run `specfuzz replay {subject.name}`")
    if not done.violations:
        raise UsageError(
            f"{subject.name}: holds on engine {subject.engine}, so there is nothing to export; "
            "name one that it fails on with --engine"
        )
    if done.verdict is None:
        raise _cannot(subject, "the process died, and so would pytest")
    return _first_that_shows(subject, done.verdict, _finding(subject, done, invariant))


def _finding(subject: Subject, done: Replay, invariant: str | None) -> Finding:
    """What is to be shown."""
    finding = done.finding
    assert finding is not None
    if invariant is None:
        return finding
    slugs = [violation.invariant for violation in done.violations]
    if invariant not in slugs:
        raise UsageError(f"--invariant: {invariant} holds in {subject.name}; {closest(invariant, set(slugs))}")
    return replace(finding, invariant=invariant, violation=done.violations[slugs.index(invariant)])


def _first_that_shows(subject: Subject, verdict: Verdict, finding: Finding) -> str:
    """The file of the first claim that can be made, and that is seen to fail where upstream's classes are at hand."""
    real = subject.engine == fuzz.engines.TENSORRT_LLM
    engine = fuzz.engines.load(subject.engine, subject.device)
    outcome = ""
    for claim in claims(verdict, finding.invariant):
        text = exported.render(finding, claim, _faults(subject, engine, claim))
        outcome = _outcome(text, engine, subject.scenario) if real else claim.message
        if outcome == claim.message:
            return text
    if outcome:
        raise _cannot(subject, f"without the executor and the KV cache {finding.invariant} does not show: {outcome}")
    fields = find(finding.invariant).reads
    reads = ", ".join(fields) or "no field" if len(fields) <= _LISTED else f"any of {len(fields)} fields"
    raise _cannot(subject, f"{finding.invariant} is about {reads}, and from there on a file could read nothing wrong")


def _cannot(subject: Subject, why: str) -> UsageError:
    return UsageError(f"{subject.name}: cannot be exported: {why}; use `specfuzz replay {subject.name}`")


def _faults(subject: Subject, engine: Any, claim: Claim) -> dict[int, int]:
    """Step -> which passage of its fault's site, counted inside the worker's forwards, is struck."""
    struck: dict[int, int] = {}
    for index, step in enumerate(subject.scenario.steps[: claim.step + 1]):
        fault = step.fault
        if fault is None:
            continue
        kind = family(fault.site)
        if kind == SEAMS and fault.site not in exported.SEAM_METHODS:
            raise _cannot(subject, f"steps[{index}] fails at {fault.site}, which is not in the worker's forward")
        if kind not in (SEAMS, TORCH):
            raise _cannot(subject, f"steps[{index}] fails at {fault.site}, a line of one version of the source")
        if kind == TORCH and subject.engine != fuzz.engines.TENSORRT_LLM:
            raise _cannot(subject, f"steps[{index}] fails at {fault.site}, counted in another engine than upstream's")
        passage = _passage(subject, engine, index, fault)
        if passage is None:
            raise _cannot(subject, f"steps[{index}] fails at {fault}, which is not in the worker's forward")
        struck[index] = passage
    return struck


def _passage(subject: Subject, engine: Any, index: int, fault: Fault) -> int | None:
    if family(fault.site) == TORCH:
        from engines.tensorrt_llm.passages import struck_call

        return struck_call(engine, subject.scenario, index, exported.MODULES)
    if fault.site != _SHARED:
        return fault.occurrence
    # How often it is called ahead of the forward, a run that fails at the forward's begin says.
    steps = list(subject.scenario.steps[: index + 1])
    steps[index] = replace(steps[index], fault=replace(fault, site=_FIRST, occurrence=1))
    with seeded(subject.active_bug):
        trace = run(engine, replace(subject.scenario, steps=tuple(steps)), record=(SEAMS,))
    inside = fault.occurrence - trace.steps[index].sites.get(_SHARED, 0)
    return inside if inside > 0 else None


def _outcome(text: str, engine: Any, scenario: Scenario) -> str:
    """Run the file's test on the classes under test: what its assertion says, or how else it ends."""
    upstream = engine.upstream
    with upstream.active():
        upstream.load(scenario.config.worker)
        namespace: dict[str, Any] = {"__name__": "exported"}
        try:
            exec(compile(text, "<exported>", "exec"), namespace)
            test: Callable[[], None] = next(value for name, value in namespace.items() if name.startswith("test_"))
            test()
        except AssertionError as error:
            return str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest's own are no Exception
            return f"the file ends with {type(error).__name__}: {error}"
    return "the file passes"
