"""The oracle speaks of texts; here the tracer's definition over slots is run on what the oracle says is fed.

Both must choose the same tokens: the maps, lengths, positions and inputs in the oracle's trace are then such that
caches which know of nothing else give the text, its drafts and its hidden states.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given

from reference import trace
from scenarios import Context, Scenario, Step, StepTrace
from scenarios.tracer import EMPTY, PAD_TOKEN, choose, disagree
from tests.reference.cases import CHAINS, at, scenarios
from tests.reference.slots import Model, Pools, by_row, fed

CACHES = {f"{name}_kv": name for name in ("target", "draft", "target_indexer", "draft_indexer")}


@given(scenarios(workers=CHAINS))
def test_the_tracer_over_slots_gives_the_same_tokens(scenario: Scenario) -> None:
    kept: dict[int, Pools] = {}
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        rows = [Pools() if row.request is None else kept.setdefault(row.request, Pools()) for row in step.rows]
        model = Model(rows, scenario.config.index_topk)
        for run in range(len(list(taken.named("entered")))):
            replay(model, step, taken, run, parallel=scenario.config.traits.parallel)
        updated = taken.substeps[-1]
        for name in [name for name in updated.fields if name in CACHES]:
            for request, shown in updated[name].items():
                slots = getattr(kept[request], CACHES[name])
                assert shown == [slots.get(s, EMPTY) for s in range(len(shown))]


def replay(model: Model, step: Step, taken: StepTrace, run: int, *, parallel: bool) -> None:
    """One forward of target and drafter over the slots; its tokens are those of the trace."""
    inputs = {**at(taken, "prepared").fields, **at(taken, "entered", run).fields}
    restored = at(taken, "restored", run)
    hidden = by_row(inputs, model.target(fed(inputs)))
    firsts = [len(states) - 1 if isinstance(row, Context) else 0 for row, states in zip(step.rows, hidden, strict=True)]
    for first, states, new in zip(firsts, hidden, restored["new_tokens"], strict=True):
        assert new == [choose(state) for state in states[first : first + len(new)]]
    # The row of the last accepted token says what comes next.
    gathered = [first + len(new) - 1 for first, new in zip(firsts, restored["new_tokens"], strict=True)]
    calls = [dict(s.fields) for s in taken.named("draft") if s.run == run]
    if parallel:
        choices = by_row(calls[0], model.unshifted(fed(calls[0])))
        drafted = [
            [] if isinstance(row, Context) else of_row[start : start + step.draft_len]
            for row, of_row, start in zip(step.rows, choices, gathered, strict=True)
        ]
    else:
        drafted = drafts_of_a_loop(model, calls, hidden, gathered)
    for row, of_row, made in zip(step.rows, drafted, restored["next_draft_tokens"], strict=True):
        drafts = of_row[: step.draft_len]
        expected = [choice if depth < row.agree else disagree(choice) for depth, choice in enumerate(drafts)]
        assert made == expected + [PAD_TOKEN] * (len(made) - len(expected))


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
