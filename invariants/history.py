"""What a drafter keeps of each request beside the KV cache: the request's own history, as far as it is committed."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from invariants.case import StepCase
from invariants.check import Check
from invariants.registry import REFERENCE, invariant
from invariants.rows import prompt
from scenarios.tracer import EMPTY, PRIME, entry, entry_fields, term

KEPT: Final = ("mtp_past_tokens", "mtp_past_hidden_states", "automaton")
"""Fields of ``updated``, each for the workers that keep it."""


@invariant(
    "pools-match-history",
    reads=("mtp_past_tokens", "mtp_past_hidden_states", "target_kv"),
    museum=("TRT-24",),
    predicates=("P10",),
)
def pools_match_history(step: StepCase, check: Check) -> None:
    """After each step vanilla MTP keeps, of each request, the last Kmax cached tokens and their hidden states.

    So neither what was fed and not accepted, nor what was accepted and not yet fed.
    """
    moment, size = step.updated, step.config.max_draft_len
    if moment is None or "target_kv" not in moment.seen or not step.active:
        return
    slots = moment.seen["target_kv"]
    for field, read in (("mtp_past_tokens", _tokens), ("mtp_past_hidden_states", _digests)):
        if field in moment.seen:
            expected = {request: read(cached)[-size:] for request, cached in slots.items()}
            check.equal(moment, field, expected, moment.seen[field], "so it is in target_kv")


def _tokens(slots: list[int]) -> list[int]:
    """The token in each filled slot."""
    return [fields[1] for slot in slots if (fields := entry_fields(slot)) is not None]


def _digests(slots: list[int]) -> list[int]:
    """The target's hidden state at each slot."""
    return [digest % PRIME for digest in accumulate(term(n, slot) for n, slot in enumerate(slots))]


def _text(step: StepCase, request: int, emitted: list[int]) -> list[int]:
    """The prompt of a request and its output."""
    return [*prompt(step.config.seed, step.case.requests[request]), *emitted]


@invariant("layers-look-ahead", reads=("draft_layers_kv", "emitted", "next_draft_tokens"), predicates=("P10",))
def layers_look_ahead(step: StepCase, check: Check) -> None:
    """In the cache of MTP layer ``i`` each slot ``n`` that is filled holds its position and the token of ``n + 1 + i``.

    Beyond the committed text these are the drafts that its layers made in the request's last step; where those of a
    suffix automaton were returned in their place it is not known which. Asked of the batch's requests.
    """
    moment = step.updated
    restored = step.returned
    if moment is None or restored is None or not step.active:
        return
    if not {"draft_layers_kv", "emitted"} <= moment.seen.keys() or "next_draft_tokens" not in restored.seen:
        return
    shown, emitted = moment.seen["draft_layers_kv"], moment.seen["emitted"]
    expected = {}
    for row, drafts in zip(step.rows, restored.seen["next_draft_tokens"], strict=False):
        if row.request is not None and row.request in shown and row.request in emitted:
            text = _text(step, row.request, emitted[row.request])
            tokens = text if row.overridden else [*text, *drafts]
            expected[row.request] = [_looking(slots, tokens[1 + i :]) for i, slots in enumerate(shown[row.request])]
    # Of a request that is not in the batch the drafts of its last step are not at hand.
    asked = {request: shown[request] for request in expected}
    if asked:
        check.equal(moment, "draft_layers_kv", expected, asked, "so go the text and the drafts")


def _looking(slots: list[int], tokens: list[int]) -> list[int]:
    """What the slots of a layer should hold: each that is filled the token of ``tokens`` that belongs there.

    Which slots are filled, and what those hold for which there is no token, is not said here: these are as shown.
    """
    filled = [EMPTY if slot == EMPTY else entry(n, token) for n, (slot, token) in enumerate(zip(slots, tokens))]
    return filled + slots[len(filled) :]


@invariant(
    "automaton-holds-text", reads=("automaton", "emitted"), museum=("TRT-70", "TRT-110", "TRT-155"), predicates=("P10",)
)
def automaton_holds_text(step: StepCase, check: Check) -> None:
    """After each step the suffix automaton of a request holds its whole prompt and what it has emitted, no more.

    Also where nothing is drafted (PR #16888), and for requests that are not in the batch. Beside a draft model the
    first emitted token comes with the request's first generation.
    """
    moment = step.updated
    if moment is None or not {"automaton", "emitted"} <= moment.seen.keys() or not step.active:
        return
    expected = {}
    for request, tokens in moment.seen["emitted"].items():
        if request in step.case.requests:
            waits = step.traits.draft_model and len(tokens) < 2
            expected[request] = _text(step, request, [] if waits else tokens)
    check.equal(moment, "automaton", expected, moment.seen["automaton"], "prompt and output")


@invariant(
    "history-equals-reference",
    reads=KEPT,
    museum=("TRT-24", "TRT-70", "TRT-110", "TRT-155"),
    kind=REFERENCE,
    predicates=("P10",),
)
def history_equals_reference(step: StepCase, check: Check) -> None:
    """What a drafter keeps of each request is the reference's, and it keeps nothing of any other."""
    if step.updated is not None and step.active:
        check.said(step.updated, KEPT)
