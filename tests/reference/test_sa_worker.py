"""The suffix automaton: nothing of the metadata moves, and its drafts continue the text that it holds."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given

from reference import trace
from scenarios import Config, Context, Generation, Phase, Request, Scenario, Step, check
from scenarios.tracer import EMPTY, PAD_TOKEN, disagree, prompt_token
from tests.reference.cases import SA, at, last_step, scenarios, serve
from tests.reference.test_oracle_properties import greedy

METADATA = ("_seq_lens", "kv_lens_cuda", "num_contexts", "use_spec_decoding", "_saved_tensors")


def test_nothing_is_saved_and_nothing_moves() -> None:
    step = serve(SA)
    assert [s.name for s in step.substeps] == ["prepared", "entered", "verified", "restored", "updated"]
    for substep in step.substeps[:-1]:
        assert [substep[name] for name in METADATA] == [[5, 4, 4], [5, 14, 24], 1, True, []]
    assert at(step, "verified")["num_accepted_tokens"] == [1, 3, 2]


def test_nor_in_start_up() -> None:
    dummies = (Generation(request=None, past=10, accept=3), Generation(request=None, past=0, accept=2))
    step = last_step(
        Config(worker=SA, max_draft_len=3), (), Step(phase=Phase.CAPTURE, draft_len=3, generations=dummies)
    )
    assert [s.name for s in step.substeps] == ["prepared", *["entered", "verified", "restored"] * 3, "updated"]
    assert all(s["kv_lens_cuda"] == [14, 4] for s in step.substeps[:-1])
    for restored in step.named("restored"):
        assert restored["new_tokens_lens"] == [3, 2]
        assert {"next_draft_tokens", "next_new_tokens"}.isdisjoint(restored.fields)
    assert at(step, "updated")["automaton"] == {}


def test_draft_length_zero_only_takes_in_the_token() -> None:
    step = serve(SA, acc=(1, 1), draft_len=0, max_draft_len=3)
    assert [s.name for s in step.substeps] == ["prepared", "entered", "restored", "updated"]
    restored, updated = at(step, "restored"), at(step, "updated")
    assert restored["next_draft_tokens"] == [[], [], []]
    assert [text[-1] for text in updated["automaton"].values()] == [new for (new,) in restored["new_tokens"]]


def test_the_text_is_one_token_ahead_of_the_caches() -> None:
    updated = at(serve(SA), "updated")
    assert {i: len(text) for i, text in updated["automaton"].items()} == {0: 6, 1: 14, 2: 23}
    assert {i: len(slots) for i, slots in updated["draft_kv"].items()} == {0: 5, 1: 13, 2: 22}
    assert all(slot == EMPTY for slots in updated["draft_kv"].values() for slot in slots)


def test_a_prompt_in_chunks_is_known_whole_from_the_first_one_on() -> None:
    chunks = [Step(draft_len=2, contexts=(Context(request=0, chunk=n, agree=2),)) for n in (2, 3)]
    scenario = check(
        Scenario(
            config=Config(worker=SA, max_draft_len=2), requests=(Request(id=0, prompt_len=5),), steps=tuple(chunks)
        )
    )
    head, tail = trace(scenario).steps
    prompt = [prompt_token(0, 0, n) for n in range(5)]
    text = list(islice(greedy(prompt, 0), 3))
    assert at(head, "updated")["automaton"] == {0: prompt}
    assert at(tail, "updated")["automaton"] == {0: prompt + text[:1]}
    # What the target samples after two tokens goes nowhere; both steps draft what follows their text.
    assert at(head, "restored")["new_tokens"] != [text[:1]]
    assert at(head, "restored")["next_draft_tokens"] == [text[:2]]
    assert at(tail, "restored")["next_draft_tokens"] == [text[1:]]


@pytest.mark.parametrize("index_topk", [0, 2])
@pytest.mark.parametrize(("agree", "kinds"), [(0, "ppp"), (1, "add"), (2, "aad"), (3, "aaa")])
def test_a_text_is_continued_undisturbed_and_without_a_match_not_at_all(
    agree: int, kinds: str, index_topk: int
) -> None:
    config = Config(
        worker=SA,
        max_draft_len=3,
        attention_backend="DSA" if index_topk else "TRTLLM",
        index_topk=index_topk,
    )
    prefill = Step(draft_len=3, contexts=(Context(request=0, chunk=5, agree=agree),))
    step = last_step(config, (Request(id=0, prompt_len=5),), prefill)
    _, *following = islice(greedy([prompt_token(0, 0, n) for n in range(5)], index_topk), 4)
    expected = {
        "a": lambda token: token,
        "d": disagree,
        "p": lambda _: PAD_TOKEN,
    }
    (drafts,) = at(step, "restored")["next_draft_tokens"]
    assert drafts == [expected[kind](token) for kind, token in zip(kinds, following, strict=True)]


@given(scenarios([SA]))
def test_the_text_grows_by_what_is_committed(scenario: Scenario) -> None:
    texts: dict[int, list[int]] = {}
    past: dict[int, int] = {}
    for step, taken in zip(scenario.steps, trace(scenario).steps, strict=True):
        for row, new in zip(step.rows, at(taken, "restored")["new_tokens"]):
            if row.request is None:
                continue
            length = scenario.requests[row.request].prompt_len
            text = texts.setdefault(row.request, [prompt_token(0, row.request, n) for n in range(length)])
            past[row.request] = past.get(row.request, 0) + (row.chunk if isinstance(row, Context) else len(new))
            if past[row.request] >= length:
                text += new
        assert at(taken, "updated")["automaton"] == texts
