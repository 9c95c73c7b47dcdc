"""Vanilla MTP: worked examples from running upstream's class, and its layers taken literally over slots and pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given

from reference import trace
from scenarios import Context, Generation, Phase, Scenario, Step, StepTrace
from scenarios.tracer import EMPTY, PRIME, disagree, entry_fields, term
from tests.reference.cases import MTP, at, configuration, last_step, scenarios, serve
from tests.reference.slots import Model, Pools, by_row, fed


@pytest.mark.parametrize(
    ("contexts", "past", "acc", "draft_len", "kv0", "during", "first_positions"),
    [
        ((5,), (10, 20), (3, 2), 3, [5, 14, 24], [5, 13, 22], [10, 19]),
        ((), (10, 20, 7), (3, 2, 1), 3, [14, 24, 11], [13, 22, 8], [10, 19, 5]),
        ((3, 3), (), (), 3, [3, 3], [3, 3], []),
        ((5,), (10, 20), (2, 1), 1, [5, 12, 22], [5, 12, 21], [11, 20]),
        ((5,), (10, 20), (3, 1), 2, [5, 13, 23], [5, 13, 21], [11, 19]),
        ((5,), (10, 20), (5, 2), 4, [5, 15, 25], [5, 15, 22], [11, 18]),
    ],
)
def test_what_every_layer_sees(
    contexts: tuple[int, ...],
    past: tuple[int, ...],
    acc: tuple[int, ...],
    draft_len: int,
    kv0: list[int],
    during: list[int],
    first_positions: list[int],
) -> None:
    step = serve(MTP, contexts=contexts, past=past, acc=acc, draft_len=draft_len)
    calls = list(step.named("draft"))
    assert len(calls) == draft_len
    assert [at(step, name)["kv_lens_cuda"] for name in ("prepared", "entered", "verified", "saved")] == [kv0] * 4
    seq_lens = [*contexts, *[draft_len] * len(past)]
    for call in calls:
        assert (call["_seq_lens"], call["_seq_lens_cuda"], call["kv_lens_cuda"]) == (seq_lens, seq_lens, during)
        assert (call["num_contexts"], call["num_ctx_tokens"]) == (len(contexts), sum(contexts))
        assert (call["num_generations"], call["num_tokens"]) == (len(past), sum(seq_lens))
        assert call["host_request_types"] == [0] * len(contexts) + [1] * len(past)
        assert (call["use_spec_decoding"], call["_saved_tensors"]) == (True, ["_seq_lens", "_seq_lens_cuda"])
        expected = [x for prompt in contexts for x in range(prompt)]
        assert call["position_ids"] == expected + [x + j for x in first_positions for j in range(draft_len)]
    assert at(step, "restored")["kv_lens_cuda"] == during


def test_layers_look_one_token_further_each() -> None:
    step = serve(MTP)
    first, second, third = (call["input_ids"] for call in step.named("draft"))
    prompt = at(step, "prepared")["input_ids"][:5]
    accepted = at(step, "verified")["accepted_tokens"]
    drafts = at(step, "restored")["next_draft_tokens"]
    assert first[:5] == [*prompt[1:], accepted[0][0]]
    assert second[:5] == [*prompt[2:], accepted[0][0], drafts[0][0]]
    assert third[:5] == [*prompt[3:], accepted[0][0], *drafts[0][:2]]
    # All three accepted tokens, then two of them and the first draft, and so on.
    assert [ids[5:8] for ids in (first, second, third)] == [
        accepted[1],
        [*accepted[1][1:], drafts[1][0]],
        [accepted[1][2], *drafts[1][:2]],
    ]
    # Two are accepted, so the first row feeds the token that was cached last before them.
    assert first[8:] == [at(step, "prepared")["input_ids"][9], *accepted[2]]


def test_hidden_states_move_with_the_tokens() -> None:
    first, second, third = (call["hidden_states"] for call in serve(MTP).named("draft"))
    for rows in (slice(0, 5), slice(5, 8), slice(8, 11)):
        assert second[rows][:-1] == first[rows][1:]
        assert third[rows][:-1] == second[rows][1:]


def test_the_pools_hold_the_last_cached_tokens() -> None:
    step = serve(MTP)
    updated, fed_tokens = at(step, "updated"), at(step, "prepared")["input_ids"]
    # A prompt of 5; 3 of the 4 tokens fed, and 2 of 4 after one that was cached before.
    assert updated["mtp_past_tokens"][0] == fed_tokens[2:5]
    assert updated["mtp_past_tokens"][1] == fed_tokens[5:8]
    assert updated["mtp_past_tokens"][2][1:] == fed_tokens[9:11]
    for request, tokens in updated["mtp_past_tokens"].items():
        slots = updated["target_kv"][request]
        assert [entry_fields(slot) for slot in slots[-3:]] == list(zip(range(len(slots) - 3, len(slots)), tokens))
        digests = [sum(term(n, slot) for n, slot in enumerate(slots[: end + 1])) % PRIME for end in range(len(slots))]
        assert updated["mtp_past_hidden_states"][request] == digests[-3:]


def test_a_token_before_k_others_is_looked_at_by_no_layer() -> None:
    step = serve(MTP, contexts=(), past=(10,), acc=(4,))
    for i, slots in enumerate(at(step, "updated")["draft_layers_kv"][0]):
        assert [n for n, slot in enumerate(slots) if slot == EMPTY] == [10], i
    step = serve(MTP, contexts=(4,), past=(10,), acc=(3,))
    assert not any(EMPTY in slots for layers in at(step, "updated")["draft_layers_kv"].values() for slots in layers)


def test_what_dummies_are_fed_is_not_specified() -> None:
    dummies = (Generation(request=None, past=10, accept=3), Generation(request=None, past=3))
    for phase in (Phase.WARMUP, Phase.CAPTURE):
        step = last_step(configuration(MTP, 3), (), Step(phase=phase, draft_len=3, generations=dummies))
        for call in step.named("draft"):
            assert {"input_ids", "hidden_states"}.isdisjoint(call.fields)
            assert call["position_ids"] == [10, 11, 12, 1, 2, 3]
            assert call["kv_lens_cuda"] == [13, 4]
        for restored in step.named("restored"):
            assert {"next_draft_tokens", "next_new_tokens"}.isdisjoint(restored.fields)
            assert restored["kv_lens_cuda"] == [13, 4]
        assert [s["_saved_tensors"] for s in step.named("saved")] == [["_seq_lens", "_seq_lens_cuda"]] * len(
            list(step.named("entered"))
        )
        updated = at(step, "updated")
        assert "draft_kv" not in updated
        assert updated["draft_layers_kv"] == updated["mtp_past_tokens"] == updated["mtp_past_hidden_states"] == {}


# The layers taken literally


@dataclass
class Kept:
    """A request's pools and what the worker keeps of it, as upstream's manager does."""

    pools: Pools = field(default_factory=Pools)
    tokens: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)


def shift(pool: list[int], inputs: list[int], count: int, size: int) -> list[int]:
    """The pool after ``count`` of the inputs were cached."""
    return [*pool, *inputs[:count]][-size:]


@given(scenarios([MTP]))
def test_the_layers_over_slots_give_the_same_tokens(scenario: Scenario) -> None:
    kept: dict[int, Kept] = {}
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        if step.phase.is_startup:
            continue
        rows = [kept.setdefault(row.request, Kept()) for row in step.rows if row.request is not None]
        replay(rows, step, taken)
        updated = taken.substeps[-1]
        for request, mine in kept.items():
            assert updated["mtp_past_tokens"][request] == mine.tokens
            assert updated["mtp_past_hidden_states"][request] == mine.hidden
            shown = updated["draft_layers_kv"][request]
            past = len(updated["target_kv"][request])
            assert shown == [[mine.pools.layers[i].get(n, EMPTY) for n in range(past)] for i in range(len(shown))]


def replay(rows: list[Kept], step: Step, taken: StepTrace) -> None:
    """One forward of target and layers; what the layers are given is worked out from the pools."""
    model, k = Model([row.pools for row in rows]), step.draft_len
    inputs = {**at(taken, "prepared").fields, **at(taken, "entered").fields}
    states = by_row(inputs, model.target(fed(inputs), inputs))
    ids, hidden = [], []
    accepted_rows = at(taken, "verified")["accepted_tokens"]
    for row, asked, tokens, of_row, accepted in zip(
        rows, step.rows, by_row(inputs, inputs["input_ids"]), states, accepted_rows, strict=True
    ):
        count = len(tokens) if isinstance(asked, Context) else len(accepted)
        row.tokens, row.hidden = shift(row.tokens, tokens, count, k), shift(row.hidden, of_row, count, k)
        whole = isinstance(asked, Context)
        ids.append([*(tokens if whole else row.tokens)[1:], accepted[-1]])
        hidden.append(list(of_row if whole else row.hidden))
    drafts: list[list[int]] = [[] for _ in rows]
    for i in range(k):
        call: dict[str, Any] = dict(at(taken, f"draft[{i}]").fields)
        assert (by_row(call, call["input_ids"]), by_row(call, call["hidden_states"])) == (ids, hidden)
        answers = by_row(call, model.layer(i, fed(call), call["hidden_states"]))
        for b, (asked, of_row) in enumerate(zip(step.rows, answers, strict=True)):
            choice, state = of_row[-1]
            drafts[b].append(choice if i < asked.agree else disagree(choice))
            ids[b], hidden[b] = [*ids[b][1:], drafts[b][-1]], [*hidden[b][1:], state]
    assert at(taken, "restored")["next_draft_tokens"] == drafts
