"""A forward borrows the attention metadata: it saves, edits and gives back, whether it succeeds or fails."""

from __future__ import annotations

from typing import Final

from invariants.case import StepCase
from invariants.check import Check
from invariants.pools import pools
from invariants.registry import REFERENCE, invariant
from scenarios import FIELDS, Phase
from scenarios.trace import ENTERED, FAILED, PREPARED, RESTORED, UNREADABLE

LAYOUT: Final = (
    "num_contexts",
    "_seq_lens",
    "_seq_lens_cuda",
    "num_generations",
    "num_ctx_tokens",
    "num_tokens",
    "host_request_types",
    "all_rank_num_tokens",
)
"""Who is in the batch and with how many tokens: what a forward must give back. Sources first, then what derives."""

_AROUND: Final = (PREPARED, ENTERED, RESTORED, FAILED)
"""Sub-steps at which no forward of the worker is under way."""
_ON_DEVICE: Final = frozenset(field for field, what in FIELDS.items() if what.startswith("device"))
"""Fields that are tensors on the device."""
_OF_ALL_STEPS: Final = frozenset(
    {"sa_match_len", "sa_draft_tokens", "previous_kv_lens_offsets_cuda", "previous_pos_id_offsets_cuda"}
)
"""Of these the ones that are not of the metadata: one for all steps, graphs included."""
_SHARED: Final = frozenset(
    {
        "device",
        "kv_cache_manager",
        "draft_kv_cache_manager",
        "runtime_features",
        "sparse_metadata_params",
        "_linear_mask",
        "_linear_offsets",
        "spec_decoding_packed_mask",
        "spec_decoding_position_offsets",
        "spec_decoding_generation_lengths",
    }
)
"""What the metadata of a graph has in common with the one that it was copied from."""


@invariant("forward-not-overridden", reads=(), museum=("TRT-01",), predicates=("P2",))
def forward_not_overridden(step: StepCase, check: Check) -> None:
    """No worker class replaces ``forward``, whose template method cleans up: it is SpecWorkerBase's own.

    PR #16382. The class guard refuses an override in a class body; an assignment after creation and a mixin
    listed before the base escape it, and are seen here.
    """
    owners = step.case.trace.classes.get("forward_defined_in")
    if step.index == 0 and owners is not None:
        first = owners[0] if owners else None
        check.run(
            first == "SpecWorkerBase", 0, None, "SpecWorkerBase", first, f"forward is {first}'s, so nothing cleans up"
        )


@invariant(
    "steps-complete",
    reads=("exception", "message"),
    museum=("TRT-01", "TRT-13", "TRT-34", "TRT-39", "TRT-71", "VLL-02"),
)
def steps_complete(step: StepCase, check: Check) -> None:
    """A step in which nothing is planned to fail does not fail."""
    if step.asked.fault is not None:
        return
    moment = step.failed
    if moment is None:
        outcome = step.actual.outcome
        check.run(outcome == "ok", step.index, None, "ok", outcome, f"the step ended {outcome}")
        return
    what = f"{moment.seen.get('exception')}: {moment.seen.get('message')}"
    check.that(False, moment, "exception", None, what, f"the step failed with {what}")


@invariant("state-can-be-read", reads=("exception", "message"), museum=("TRT-01", "TRT-63"))
def state_can_be_read(step: StepCase, check: Check) -> None:
    """Whatever there is to be observed can be read: no tensor is missing, and none is shorter than the batch."""
    for moment in step.moments:
        what = f"{moment.seen.get('exception')}: {moment.seen.get('message')}" if moment.name == UNREADABLE else None
        check.that(what is None, moment, "exception", None, what, f"what was to be observed cannot be read, {what}")


@invariant("run-complete", reads=())
def run_complete(step: StepCase, check: Check) -> None:
    """The run goes on to the scenario's last step, or to the one whose failure is fatal."""
    case = step.case
    if step is not case.steps[-1] or step.actual.outcome != step.expected.outcome:
        return
    done, wanted = len(case.trace.steps), len(case.expected.steps)
    check.run(done == wanted, step.index, None, wanted, done, f"{done} steps ran, not {wanted}")


@invariant("fault-surfaces", reads=("exception",), museum=("TRT-01",))
def fault_surfaces(step: StepCase, check: Check) -> None:
    """A planned fault is raised once, and it is what ends the step: not swallowed, not replaced on its way."""
    fault, actual = step.asked.fault, step.actual
    if fault is None:
        return
    check.run(actual.fired == 1, step.index, None, 1, actual.fired, f"{fault} was raised {actual.fired} times")
    outcome = step.expected.outcome
    check.run(actual.outcome == outcome, step.index, None, outcome, actual.outcome, f"the step ended {actual.outcome}")
    if step.failed is not None and actual.fired:
        name = step.failed.seen.get("exception")
        check.that(actual.injected, step.failed, "exception", str(fault), name, f"{fault} surfaced as {name}")


@invariant("saved-state-empty", reads=("_saved_tensors",), museum=("TRT-01",), predicates=("P2",))
def saved_state_empty(step: StepCase, check: Check) -> None:
    """Outside the worker's forward nothing is saved: a leaked entry makes every later forward fail.

    PR #16382: out of memory between save and restore, survived by the general warm-up.
    """
    for moment in step.moments:
        if moment.name in _AROUND and "_saved_tensors" in moment.seen:
            check.equal(moment, "_saved_tensors", [], moment.seen["_saved_tensors"], "nothing may stay saved")


@invariant("forward-closes-what-it-opens", reads=("left_open",), museum=("TRT-01",), predicates=("P2",))
def forward_closes_what_it_opens(step: StepCase, check: Check) -> None:
    """A forward that succeeds has itself put back all that it saved: cleaning up is for those that fail.

    PR #17381: saving and restoring are paired. What relies on the cleanup restores late, after its last sub-step, and
    not at all where there is none.
    """
    for run in step.runs:
        if run.restored is not None and "left_open" in run.restored.seen:
            left = run.restored.seen["left_open"]
            check.equal(run.restored, "left_open", [], left, "a forward that succeeds leaves nothing to clean up")


@invariant(
    "saved-fields",
    reads=("_saved_tensors", "left_open"),
    museum=("TRT-01", "TRT-06"),
    kind=REFERENCE,
    trait="draft_model",
    predicates=("P2",),
)
def saved_fields(step: StepCase, check: Check) -> None:
    """While drafting, the originals of exactly the fields that this worker edits are saved, in upstream's order.

    Before that, while drafts are verified, there are none, and after it all of them are put back.
    """
    for run in step.runs:
        for moment in (run.verified, run.saved, *run.drafts.values()):
            if moment is not None:
                check.said(moment, ("_saved_tensors",))
        if run.restored is not None:
            check.said(run.restored, ("left_open",))


@invariant("restored-identity", reads=("identity",), museum=("TRT-01", "TRT-09", "TRT-87"), predicates=("P2",))
def restored_identity(step: StepCase, check: Check) -> None:
    """After a forward, success or failure, each field refers to the tensor object that it referred to before.

    A captured graph reads addresses: equal contents in another tensor are not enough.
    """
    before = step.prepared
    if before is None or "identity" not in before.seen:
        return
    labels = before.seen["identity"]
    for moment in step.moments:
        if moment is not before and moment.name in _AROUND and "identity" in moment.seen:
            seen = moment.seen["identity"]
            expected = {field: labels[field] for field in labels if field in seen}
            actual = {field: seen[field] for field in expected}
            check.equal(moment, "identity", expected, actual, "the object of prepared must be back")


@invariant(
    "restored-layout", reads=LAYOUT, museum=("TRT-01", "TRT-03", "TRT-06", "TRT-93", "TRT-120"), predicates=("P1", "P2")
)
def restored_layout(step: StepCase, check: Check) -> None:
    """After a forward, success or failure, the batch layout is what it was before it, counters included.

    PR #17381: ``num_contexts`` is no tensor, is not saved with them, and the counters derive from it.
    """
    before = step.prepared
    if before is None:
        return
    for moment in step.moments:
        if moment.name in (RESTORED, FAILED):
            check.kept(moment, before, LAYOUT)


@invariant("substeps-in-order", reads=(), museum=("TRT-70", "VLL-22"), kind=REFERENCE, predicates=("P3", "P4"))
def substeps_in_order(step: StepCase, check: Check) -> None:
    """A step that succeeds passes every sub-step once and in order: K draft calls, or one that makes all drafts.

    Without drafts a linear drafter still makes one call, to take in the step's tokens (PR #16888); a drafter with a
    context of its own makes none then, nor for a batch of contexts. A worker without a draft model makes none and
    saves nothing.
    """
    unreadable = any(moment.name == UNREADABLE for moment in step.moments)
    if step.actual.outcome != "ok" or step.asked.fault is not None or unreadable:
        return
    expected = [s.key for s in step.expected.substeps]
    actual = [(m.name, m.run) for m in step.moments]
    check.run(expected == actual, step.index, None, expected, actual, f"the sub-steps are {_path(actual)}")


def _path(keys: list[tuple[str, int]]) -> str:
    return " ".join(f"{name}#{run}" if run else name for name, run in keys)


@invariant(
    "graph-buffers-stable", reads=("identity",), museum=("TRT-09", "TRT-110", "VLL-12", "SGL-10"), predicates=("P13",)
)
def graph_buffers_stable(step: StepCase, check: Check) -> None:
    """A replayed graph finds the device tensors that it was captured with: the very objects, not equal ones."""
    captured = step.captured
    if captured is None:
        return
    for now, then in zip(step.runs[:1], captured.runs[-1:], strict=False):
        if now.entered is not None and then.entered is not None:
            seen, labels = now.entered.seen.get("identity", {}), then.entered.seen.get("identity", {})
            expected = {f: label for f, label in labels.items() if f in seen and f in _ON_DEVICE}
            actual = {f: seen[f] for f in expected}
            if expected:
                check.equal(now.entered, "identity", expected, actual, "the graph reads the tensor of its capture")


@invariant("graph-buffers-apart", reads=("identity",), museum=("TRT-09", "VLL-11"), predicates=("P13",))
def graph_buffers_apart(step: StepCase, check: Check) -> None:
    """A captured graph and a step that Python runs have device tensors of their own; graphs may share theirs.

    PR #17932: the metadata of a graph starts as a shallow copy, and what its initialiser leaves out stays shared.
    """
    mine = _device_tensors(step)
    if step.asked.phase is Phase.REPLAY or not mine:
        return
    captures = step.asked.phase is Phase.CAPTURE
    others = [
        other
        for other in step.case.steps[: step.index]
        if other.asked.phase is not Phase.REPLAY and (other.asked.phase is Phase.CAPTURE) != captures
    ]
    if others and step.prepared is not None:
        taken = {label for other in others for label in _device_tensors(other).values()}
        shared = sorted(field for field, label in mine.items() if label in taken)
        message = f"{shared} are {'those of a step outside the graph' if captures else 'those of a graph'}"
        check.that(not shared, step.prepared, "identity", [], shared, message)


@invariant("graph-fits-the-batch", reads=("graph_key",), museum=("TRT-20", "TRT-75", "TRT-88"), predicates=("P13",))
def graph_fits_the_batch(step: StepCase, check: Check) -> None:
    """The graph that a step captures or replays is for just its generations and tokens; other steps use no graph.

    Of two graphs that differ in their tokens alone, as where verify widths differ, the wrong one reads rows of an
    earlier step or leaves some out, and nothing else says which of the two it was.
    """
    if step.updated is None or "graph_key" not in step.updated.seen:
        return
    key = step.updated.seen["graph_key"]
    if step.asked.phase not in (Phase.CAPTURE, Phase.REPLAY):
        check.equal(step.updated, "graph_key", None, key, "this step runs without a graph")
        return
    batch = [len(step.rows), sum(row.query for row in step.rows)]
    fits = bool(key) and [key[0], key[-1]] == batch
    check.that(fits, step.updated, "graph_key", batch, key, f"graph {key} has another batch than {batch}")


@invariant(
    "graph-copies-share-no-state", reads=("shared_with_eager",), museum=("TRT-09", "VLL-11"), predicates=("P13",)
)
def graph_copies_share_no_state(step: StepCase, check: Check) -> None:
    """The metadata of a graph shares settings, KV-cache managers and masks with its original, and nothing else.

    Upstream's copy is shallow: whatever its initialiser does not make anew, the saved tensors among it, is one object
    for both. Masks are meant to be: they are written before each step, whichever of the two it uses.
    """
    for run in step.runs:
        moment = run.entered
        if moment is not None and "shared_with_eager" in moment.seen:
            shared = moment.seen["shared_with_eager"]
            more = sorted(set(shared) - _SHARED)
            message = f"{more} are one object with the metadata that it was copied from"
            check.that(not more, moment, "shared_with_eager", sorted(_SHARED), shared, message)
            managers = [pool.field("kv_cache_manager") for pool in pools(step.config)]
            own = sorted(set(managers) - set(shared))
            check.that(not own, moment, "shared_with_eager", managers, shared, f"the copy has {own} of its own")


def _device_tensors(step: StepCase) -> dict[str, str]:
    """Labels of the device tensors that the metadata of a step is prepared in."""
    labels = step.prepared.seen.get("identity", {}) if step.prepared is not None else {}
    return {field: label for field, label in labels.items() if field in _ON_DEVICE - _OF_ALL_STEPS}
