"""The oracle speaks of texts; here the tracer's definition over slots is run on what the oracle says is fed.

Both must choose the same tokens: the maps, lengths, positions and inputs in the oracle's trace are then such that
caches which know of nothing else give the text, its drafts and its hidden states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reference import trace
from reference.attention import Sight
from scenarios import Config, Context, Scenario, Step, StepTrace, Substep, check
from scenarios.tracer import EMPTY, PAD_TOKEN, choose, disagree
from tests.reference.cases import CONTEXT, LINEAR, PARD, at, scenarios
from tests.reference.slots import Fed, Model, Pools, by_row, fed

RATIOS = [(1, 2), (1, 4), (1, 2, 4)]
CACHES = {f"{name}_kv": name for name in ("target", "draft", "target_indexer", "draft_indexer")}


@given(scenarios([*LINEAR, PARD, *CONTEXT]))
def test_the_tracer_over_slots_gives_the_same_tokens(scenario: Scenario) -> None:
    over_slots(scenario)


@given(
    scenarios([*LINEAR, PARD], index_topk=0, ragged=False),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from(RATIOS),
)
def test_so_it_does_over_compressed_tokens(
    dense: Scenario, index_topk: int, window_size: int, compress_ratios: tuple[int, ...]
) -> None:
    sizes = {"index_topk": index_topk, "window_size": window_size, "compress_ratios": compress_ratios}
    over_slots(check(replace(dense, config=replace(dense.config, attention_backend="DEEPSEEK_V4", **sizes))))


@given(scenarios(LINEAR[:2], index_topk=0, ragged=False), st.booleans())
def test_so_it_does_through_views(dense: Scenario, separate: bool) -> None:
    own = {"use_separate_draft_kv_cache": True, "draft_num_blocks": 64, "draft_tokens_per_block": 3}
    sizes = own if separate else {}
    over_slots(check(replace(dense, config=replace(dense.config, attention_backend="FLASHINFER", **sizes))))


def over_slots(scenario: Scenario) -> None:
    """Run the tracer over slots as the oracle's trace says, and compare what each holds."""
    kept: dict[int, Pools] = {}
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        rows = [Pools() if row.request is None else kept.setdefault(row.request, Pools()) for row in step.rows]
        model = Model(rows, Sight.of(scenario.config))
        for run in range(len(list(taken.named("entered")))):
            replay(model, step, taken, run, scenario.config)
        updated = taken.substeps[-1]
        caches = dict(updated.fields)
        if scenario.config.compress_ratios:
            keys = caches["target_compressed_kv"][scenario.config.compress_ratios[1]]
            assert caches.pop("target_indexer_kv") == keys
        for name in [name for name in caches if name in CACHES]:
            for request, shown in updated[name].items():
                slots = getattr(kept[request], CACHES[name])
                assert shown == [slots.get(s, EMPTY) for s in range(len(shown))]
        for ratio, by_request in updated.fields.get("target_compressed_kv", {}).items():
            for request, shown in by_request.items():
                assert shown == [kept[request].compressed[ratio][i] for i in range(len(shown))]
        for request, shown in updated.fields.get("draft_context", {}).items():
            assert shown == kept[request].columns


def replay(model: Model, step: Step, taken: StepTrace, run: int, config: Config) -> None:
    """One forward of target and drafter over the slots; its tokens are those of the trace."""
    inputs = {**at(taken, "prepared").fields, **at(taken, "entered", run).fields}
    restored = at(taken, "restored", run)
    tokens = fed(inputs)
    hidden = by_row(inputs, model.target(tokens, inputs))
    firsts = [len(states) - 1 if isinstance(row, Context) else 0 for row, states in zip(step.rows, hidden, strict=True)]
    for first, states, new in zip(firsts, hidden, restored["new_tokens"], strict=True):
        assert new == [choose(state) for state in states[first : first + len(new)]]
    # The row of the last accepted token says what comes next.
    gathered = [first + len(new) - 1 for first, new in zip(firsts, restored["new_tokens"], strict=True)]
    calls = [dict(s.fields) for s in taken.named("draft") if s.run == run]
    traits = config.traits
    if traits.keeps_context:
        if step.phase.is_startup:
            return
        drafted = drafts_of_a_context(model, step, by_row(inputs, tokens), calls, restored)
    elif traits.parallel:
        choices = by_row(calls[0], model.unshifted(fed(calls[0])))
        drafted = [
            [] if isinstance(row, Context) else of_row[start : start + step.draft_len]
            for row, of_row, start in zip(step.rows, choices, gathered, strict=True)
        ]
    elif config.shares_target_kv:
        drafted = drafts_of_a_view(model, calls, hidden, gathered)
    else:
        drafted = drafts_of_a_loop(model, calls, hidden, gathered)
    for row, of_row, made in zip(step.rows, drafted, restored["next_draft_tokens"], strict=True):
        drafts = of_row[: step.draft_len]
        expected = [choice if depth < row.agree else disagree(choice) for depth, choice in enumerate(drafts)]
        assert made == expected + [PAD_TOKEN] * (len(made) - len(expected))


def drafts_of_a_context(
    model: Model, step: Step, tokens: list[list[Fed]], calls: list[dict[str, Any]], restored: Substep
) -> list[list[int]]:
    """Choices of one block per generation, over the columns that are kept once the step's own are added."""
    first = len(step.contexts)
    for index, of_row in enumerate(tokens):
        model.append(of_row if index < first else of_row[: restored["new_tokens_lens"][index]])
    lengths = [len(rows.columns) for rows in model.rows[first:]]
    assert restored["ctx_len"] == lengths
    drafted: list[list[int]] = [[] for _ in tokens]
    for call in calls:
        assert call["num_ctx_per_req"] == lengths
        width = len(call["input_ids"]) // len(lengths)
        for index, count in enumerate(lengths):
            position, token = call["position_ids"][index * width], call["input_ids"][index * width]
            drafted[first + index] = model.queried(first + index, count, position, token, step.draft_len)
    return drafted


def drafts_of_a_view(
    model: Model, calls: list[dict[str, Any]], hidden: list[list[int]], gathered: list[int]
) -> list[list[int]]:
    """Choices of a loop over the target's cache; checks what the calls are said to be handed on."""
    drafted: list[list[int]] = [[] for _ in gathered]
    states = [[of_row[index], of_row[index]] for of_row, index in zip(hidden, gathered, strict=True)]
    for call in calls:
        assert call["hidden_states"] == states
        inputs = zip(call["_draft_kv_runtime_lens"], call["position_ids"], call["input_ids"], states, strict=True)
        answers = [model.viewed(row, *fed_to) for row, fed_to in enumerate(inputs)]
        states = [state for _, state in answers]
        for choices, (choice, _) in zip(drafted, answers, strict=True):
            choices.append(choice)
    return drafted


def drafts_of_a_loop(
    model: Model, calls: list[dict[str, Any]], hidden: list[list[int]], gathered: list[int]
) -> list[list[int]]:
    """Choices of a linear loop per row, call by call; checks the hidden states that the calls are said to be fed."""
    drafted: list[list[int]] = [[] for _ in gathered]
    for call in calls:
        tokens = fed(call)
        states: list[int | None] = [None] * len(tokens)
        if "hidden_states" in call:
            states = call["hidden_states"]
            assert states == [state for of_row in hidden for state in of_row]
        answers = by_row(call, model.shifted(tokens, states))
        answered = [of_row[index] for of_row, index in zip(answers, gathered, strict=True)]
        for choices, (choice, _) in zip(drafted, answered, strict=True):
            choices.append(choice)
        hidden, gathered = [[state] for _, state in answered], [0] * len(gathered)
    return drafted
