"""Recurrent layers: one state per request, that after its last cached token, whatever was fed beyond it.

A forward leaves a state per token of each generation, and one of these is promoted once it is known how many tokens
stand. Contexts write their states themselves. A state has a slot; dummies share one that nobody else has.
"""

from __future__ import annotations

from typing import Final

from invariants.case import Run, StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant
from scenarios.tracer import PRIME, RECURRENT_START, term

_LIVE: Final = "ssm_states"
_MADE: Final = "intermediate_ssm_states"
_KEPT: Final = "recurrent_states"
_TIMES: Final = "update_mamba_states"


@invariant(
    "accepted-state-becomes-live",
    reads=(_LIVE, _MADE, "num_accepted_tokens", "new_tokens_lens"),
    museum=("TRT-95", "VLL-03"),
    predicates=("P8", "P10"),
)
def accepted_state_becomes_live(step: StepCase, check: Check) -> None:
    """After a forward the live state of a generation is the one that was made at its last accepted token.

    ``ssm_states[slot] == intermediate_ssm_states[g, num_accepted_tokens - 1]``; in a tree it is that of one of the
    nodes. PR #16759: one worker forgot to promote it, so that the next step went on from before this one.
    """
    for run in step.runs:
        made = run.verified.seen.get(_MADE) if run.verified is not None else None
        if made is None or run.restored is None or _LIVE not in run.restored.seen:
            continue
        live = run.restored.seen[_LIVE]
        expected = [*live[: step.num_contexts], *_promoted(step, run, made, live[step.num_contexts :])]
        check.equal(run.restored, _LIVE, expected, live, f"the forward made {made}")


def _promoted(step: StepCase, run: Run, made: list[list[int] | None], live: list[int | None]) -> list[int | None]:
    """Per generation the state to be promoted; where it may be that of several nodes, the one that was."""
    counts = (run.accepted or [])[step.num_contexts :]
    promoted: list[int | None] = []
    for states, state, count in zip(made, [*live, *[None] * (len(made) - len(live))], counts, strict=False):
        any_will_do = states is not None and step.traits.tree and state in states
        known = states is not None and 0 < count <= len(states) and not any_will_do
        promoted.append(states[count - 1] if states is not None and known else state)
    return promoted


@invariant(
    "recurrent-state-equals-cache",
    reads=(_KEPT, "target_kv"),
    museum=("TRT-57", "TRT-95", "VLL-03"),
    predicates=("P8", "P10"),
)
def recurrent_state_equals_cache(step: StepCase, check: Check) -> None:
    """The state of a request is that of the tokens in its cache, all of them and no other."""
    seen = step.updated.seen if step.updated is not None else {}
    if step.updated is not None and {_KEPT, "target_kv"} <= seen.keys() and step.active:
        slots = seen["target_kv"].items()
        expected = {i: sum(term(n, slot) for n, slot in enumerate(held)) % PRIME for i, held in slots}
        check.equal(step.updated, _KEPT, expected, seen[_KEPT], "target_kv holds these tokens")


@invariant("states-of-others-stay", reads=(_KEPT,), museum=("TRT-57",), predicates=("P11",))
def states_of_others_stay(step: StepCase, check: Check) -> None:
    """A step leaves alone the states of active requests that are not in its batch.

    PR #13151: rows that filled up a graph were given slots of such requests.
    """
    others_unchanged(step, _KEPT, check)


def others_unchanged(step: StepCase, field: str, check: Check) -> None:
    """Hold what ``field`` of ``updated`` keeps for requests outside the batch to what it was a step before."""
    moment, before = step.updated, step.before.updated if step.before is not None else None
    if moment is None or before is None or not (field in moment.seen and field in before.seen):
        return
    batch, shown, earlier = {row.request for row in step.rows}, moment.seen[field], before.seen[field]
    aside = [request for request in shown if request in earlier and request not in batch]
    if aside:
        expected = {request: earlier[request] for request in aside}
        check.equal(moment, field, expected, {i: shown[i] for i in aside}, "its requests were not in the batch")


@invariant("states-are-promoted-once", reads=(_TIMES,), museum=("TRT-95",), predicates=("P8",))
def states_are_promoted_once(step: StepCase, check: Check) -> None:
    """Each forward with generations promotes states, whatever it drafts, and one with contexts alone does not."""
    for run in step.runs:
        if run.restored is not None and _TIMES in run.restored.seen:
            expected = int(step.num_contexts < len(step.rows))
            check.equal(run.restored, _TIMES, expected, run.restored.seen[_TIMES], "generations have states to promote")


@invariant(
    "dummies-share-a-slot-of-their-own",
    reads=("state_indices", "batch_slot_ids", "sentinel_state"),
    museum=("TRT-57",),
    predicates=("P11",),
)
def dummies_share_a_slot_of_their_own(step: StepCase, check: Check) -> None:
    """Dummies share the slot behind those of requests, for states and for proposals, and what it holds never changes.

    PR #13151: they were given slots that nobody in the batch had, but a request that had been left out.
    """
    for moment in step.moments:
        for field in ("state_indices", "batch_slot_ids"):
            if field in moment.seen and step.has_dummies:
                slots = moment.seen[field]
                # Whose slot a request has is asked elsewhere.
                own = [*slots, *[None] * (len(step.rows) - len(slots))]
                rows = zip(step.rows, own, strict=False)
                expected = [slot if row.request is not None else step.config.num_blocks for row, slot in rows]
                check.equal(moment, field, expected, slots, "the slot behind those of requests")
        if "sentinel_state" in moment.seen:
            state = moment.seen["sentinel_state"]
            check.equal(moment, "sentinel_state", RECURRENT_START, state, "nobody writes to it")


@invariant(
    "recurrent-states-equal-reference",
    reads=(_LIVE, _MADE, _KEPT, _TIMES, "sentinel_state"),
    museum=("TRT-57", "TRT-95", "VLL-03"),
    kind=REFERENCE,
    predicates=("P8", "P10"),
)
def recurrent_states_equal_reference(step: StepCase, check: Check) -> None:
    """The states that a forward finds, makes and leaves are the reference's, and so is what is kept of each request."""
    for moment in step.moments:
        check.said(moment, (_LIVE, _MADE, _KEPT, _TIMES, "sentinel_state"))
