"""What upstream's executor could not produce, and what it just could."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scenarios import (
    Context,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Schedule,
    Step,
    check,
)
from tests.scenarios.story import EAGLE, PARD, REQUESTS, START, decode, dummies, fault, prefill, scenario

LIMITS = {
    "max_draft_len": (1, 31),
    "tokens_per_block": (1, 256),
    "num_blocks": (1, 16_384),
    "max_num_requests": (1, 256),
    "max_num_tokens": (1, 16_384),
    "max_seq_len": (2, 4096),
    "graph_warmup_runs": (0, 16),
    "error_budget": (0, 1_000_000),
    "seed": (0, 2**31 - 1),
}


class TestConfig:
    @pytest.mark.parametrize("name", LIMITS)
    def test_a_number_outside_its_limits_is_refused(self, name: str) -> None:
        low, high = LIMITS[name]
        for value, text in (
            (low - 1, f"too small; write {low} or more"),
            (high + 1, f"too large; write at most {high}"),
        ):
            with pytest.raises(ScenarioError) as caught:
                Schedule(replace(EAGLE, **{name: value}))
            assert str(caught.value) == f"config.{name}: {value} is {text}"
        for value in (low, high):
            Schedule(replace(EAGLE, **{name: value}))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"worker": "Eagle3OneModel"},
                "config.worker: no worker is called 'Eagle3OneModel'; did you mean 'Eagle3OneModelWorker'?",
            ),
            (
                {"attention_backend": "NONE"},
                "config.attention_backend: no attention backend is called 'NONE'; write one of "
                "DEEPSEEK_V4, DSA, FLASHINFER, TRTLLM, VANILLA",
            ),
            (
                {"kv_cache_manager": "v2"},
                "config.kv_cache_manager: no KV-cache manager is called 'v2'; did you mean 'V2'?",
            ),
            (
                {"use_separate_draft_kv_cache": True, "draft_tokens_per_block": 4},
                "config.draft_num_blocks: 0 is too small for a separate draft KV cache; write 1 or more",
            ),
            (
                {"draft_tokens_per_block": 4},
                "config.draft_tokens_per_block: 4 is the size of a separate draft KV cache, and there is none; "
                "leave it out or set config.use_separate_draft_kv_cache",
            ),
            (
                {"worker": "DFlashWorker", "use_separate_draft_kv_cache": True},
                "config.use_separate_draft_kv_cache: the drafter of DFlashWorker keeps nothing in a KV cache; "
                "leave it out",
            ),
        ],
    )
    def test_what_there_is_not_is_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ScenarioError) as caught:
            Schedule(replace(EAGLE, **change))
        assert str(caught.value) == message


class TestRequests:
    @pytest.mark.parametrize(
        ("requests", "field", "problem"),
        [
            ([Request(id=-1, prompt_len=2)], "requests[0].id", "outside 0..2**31-1"),
            ([Request(id=2**31, prompt_len=2)], "requests[0].id", "outside 0..2**31-1"),
            ([*REQUESTS, Request(id=1, prompt_len=2)], "requests[2].id", "1 is taken"),
            ([Request(id=0, prompt_len=0)], "requests[0].prompt_len", "0 is too small"),
            ([Request(id=0, prompt_len=127)], "requests[0].prompt_len", "its KV length 129"),
        ],
    )
    def test_refused(self, requests: list[Request], field: str, problem: str) -> None:
        with pytest.raises(ScenarioError, match=problem.replace("*", r"\*")) as caught:
            check(scenario(START, requests=requests))
        assert caught.value.field == field

    def test_the_longest_prompt_fits(self) -> None:
        longest = Request(id=0, prompt_len=126)
        step = Step(draft_len=0, contexts=(Context(request=0, chunk=126),))
        check(scenario(step, requests=[longest]))

    def test_a_late_request_is_named_without_an_index(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        with pytest.raises(ScenarioError) as caught:
            schedule.add(Request(id=0, prompt_len=2))
        assert caught.value.field == "request.id"


REFUSALS: dict[str, tuple[Scenario, str, str]] = {
    "no steps": (scenario(), "steps", "is empty"),
    "empty batch": (scenario(Step(draft_len=3)), "steps[0]", "the batch is empty"),
    "draft_len above": (scenario(prefill(0, k=4)), "steps[0].draft_len", "4 is outside 0..3"),
    "draft_len below": (scenario(prefill(0, k=-1)), "steps[0].draft_len", "-1 is outside 0..3"),
    "PARD draft_len": (scenario(prefill(0, k=0), config=PARD), "steps[0].draft_len", "0 is outside 1..3"),
    "after the end": (scenario(prefill(0, fault=fault(FaultKind.CUDA)), prefill(1)), "steps[1]", "ended the run"),
    "late warm-up": (scenario(START, dummies(2, phase=Phase.WARMUP)), "steps[1].phase", "warmup comes after"),
    "late capture": (scenario(START, dummies(2)), "steps[1].phase", "capture comes after"),
    "chunk of nothing": (
        scenario(Step(draft_len=3, contexts=(Context(request=0, chunk=0),))),
        "steps[0].contexts[0].chunk",
        "0 is too small",
    ),
    "chunk too long": (
        scenario(
            Step(draft_len=3, contexts=(Context(request=0, chunk=2),)),
            Step(draft_len=3, contexts=(Context(request=1, chunk=1), Context(request=0, chunk=4))),
        ),
        "steps[1].contexts[1].chunk",
        "4 exceeds the 3 prompt tokens left of request 0",
    ),
    "context agrees too much": (scenario(prefill(0, agree=4)), "steps[0].contexts[0].agree", "4 is outside 0..3"),
    "context agrees below 0": (scenario(prefill(0, agree=-1)), "steps[0].contexts[0].agree", "-1 is outside 0..3"),
    "PARD drafts nothing for contexts": (
        scenario(prefill(0, agree=1), config=PARD),
        "steps[0].contexts[0].agree",
        "1 is outside 0..0",
    ),
    "context of a dummy in service": (
        scenario(Step(draft_len=3, contexts=(Context(request=None, chunk=2),))),
        "steps[0].contexts[0].request",
        "is null in a step of phase eager",
    ),
    "generation of a dummy in service": (
        scenario(dummies(2, phase=Phase.EAGER)),
        "steps[0].generations[0].request",
        "is null in a step of phase eager",
    ),
    "context of a request in warm-up": (
        scenario(prefill(0, phase=Phase.WARMUP)),
        "steps[0].contexts[0].request",
        "a warmup step holds dummies only",
    ),
    "generation of a request in capture": (
        scenario(decode(0, phase=Phase.CAPTURE)),
        "steps[0].generations[0].request",
        "a capture step holds dummies only",
    ),
    "unknown request": (
        scenario(START, decode(0, 7)),
        "steps[1].generations[1].request",
        "no request has id 7",
    ),
    "request that finished": (
        scenario(prefill(0, finish=(0,)), decode(0)),
        "steps[1].generations[0].request",
        "request 0 has ended",
    ),
    "request that failed": (
        scenario(prefill(0, fault=fault()), prefill(0)),
        "steps[1].contexts[0].request",
        "request 0 has ended",
    ),
    "prompt computed": (scenario(START, prefill(0)), "steps[1].contexts[0].request", "already computed"),
    "prompt not computed": (
        scenario(Step(draft_len=3, contexts=(Context(request=0, chunk=2),)), decode(0)),
        "steps[1].generations[0].request",
        "still has 3 prompt tokens",
    ),
    "generation agrees too much": (
        scenario(START, decode(0, k=2, agree=3)),
        "steps[1].generations[0].agree",
        "3 is outside 0..2",
    ),
    "generation agrees below 0": (
        scenario(START, decode(0, agree=-1)),
        "steps[1].generations[0].agree",
        "-1 is outside 0..3",
    ),
    "past of a request": (
        scenario(START, Step(draft_len=3, generations=(Generation(request=0, past=5),))),
        "steps[1].generations[0].past",
        "is for dummies",
    ),
    "accept of a request": (
        scenario(START, Step(draft_len=3, generations=(Generation(request=0, accept=2),))),
        "steps[1].generations[0].accept",
        "is for dummies",
    ),
    "negative past": (scenario(dummies(2, -1)), "steps[0].generations[1].past", "-1 is too small"),
    "accepts nothing": (
        scenario(Step(phase=Phase.CAPTURE, draft_len=3, generations=(Generation(request=None, accept=0),))),
        "steps[0].generations[0].accept",
        "0 is outside 1..4",
    ),
    "accepts too much": (
        scenario(Step(phase=Phase.CAPTURE, draft_len=3, generations=(Generation(request=None, accept=5),))),
        "steps[0].generations[0].accept",
        "5 is outside 1..4",
    ),
    "context twice": (scenario(prefill(0, 1, 0)), "steps[0].contexts[2].request", "request 0 is in the batch twice"),
    "generation twice": (
        scenario(prefill(0, 1), decode(1, 0, 1)),
        "steps[1].generations[2].request",
        "request 1 is in the batch twice",
    ),
    "too many rows": (
        scenario(prefill(0, 1), config=replace(EAGLE, max_num_requests=1)),
        "steps[0]",
        "2 rows exceed max_num_requests 1",
    ),
    "too many tokens": (
        scenario(prefill(0, 1), config=replace(EAGLE, max_num_tokens=7)),
        "steps[0]",
        "8 tokens exceed max_num_tokens 7",
    ),
    "dummy context too long": (
        scenario(
            Step(
                phase=Phase.WARMUP,
                draft_len=3,
                contexts=(Context(request=None, chunk=2), Context(request=None, chunk=9)),
            ),
            config=replace(EAGLE, max_seq_len=10),
        ),
        "steps[0].contexts[1]",
        "its KV length 11",
    ),
    "dummy generation too long": (
        scenario(dummies(5, 2), config=replace(EAGLE, max_seq_len=10)),
        "steps[0].generations[0]",
        "its KV length 11",
    ),
    "request grown too long": (
        scenario(
            prefill(1, 0),
            decode(1),
            Step(draft_len=3, contexts=(), generations=(Generation(request=1), Generation(request=0))),
            config=replace(EAGLE, max_seq_len=10),
        ),
        "steps[2].generations[1]",
        "its KV length 11",
    ),
    "too many pages": (
        scenario(prefill(0, 1), config=replace(EAGLE, num_blocks=4)),
        "steps[0]",
        "5 KV-cache pages exceed num_blocks 4",
    ),
    "pages held by others": (
        scenario(START, prefill(1), config=replace(EAGLE, num_blocks=4)),
        "steps[1]",
        "5 KV-cache pages exceed num_blocks 4",
    ),
    "capture of contexts": (
        scenario(Step(phase=Phase.CAPTURE, draft_len=3, contexts=(Context(request=None, chunk=2),))),
        "steps[0].contexts",
        "holds generations only",
    ),
    "replay of contexts": (scenario(prefill(0, phase=Phase.REPLAY)), "steps[0].contexts", "holds generations only"),
    "replay of another size": (
        scenario(dummies(2, 2), START, decode(0, phase=Phase.REPLAY)),
        "steps[2].phase",
        "captured batch size 1 with draft_len 3",
    ),
    "replay of another draft_len": (
        scenario(dummies(2, k=2), START, decode(0, phase=Phase.REPLAY)),
        "steps[2].phase",
        "captured batch size 1 with draft_len 3",
    ),
    "replay of a warm-up": (
        scenario(dummies(2, phase=Phase.WARMUP), START, decode(0, phase=Phase.REPLAY)),
        "steps[2].phase",
        "no earlier step captured",
    ),
    "finish of an unknown request": (
        scenario(prefill(0, finish=(0, 7))),
        "steps[0].finish[1]",
        "request 7 is not active",
    ),
    "finish before the start": (scenario(prefill(0, finish=(1,))), "steps[0].finish[0]", "request 1 is not active"),
    "finish after the end": (
        scenario(prefill(0, finish=(0,)), prefill(1, finish=(0,))),
        "steps[1].finish[0]",
        "request 0 is not active",
    ),
    "finish twice": (scenario(prefill(0, finish=(0, 0))), "steps[0].finish[1]", "names request 0 twice"),
    "fault nowhere": (scenario(prefill(0, fault=fault(site=""))), "steps[0].fault.site", "is empty"),
    "fault never": (scenario(prefill(0, fault=fault(occurrence=0))), "steps[0].fault.occurrence", "0 is too small"),
    "finish in a step that fails": (
        scenario(prefill(0, fault=fault(), finish=(0,))),
        "steps[0].finish",
        "no request finishes in a step that fails",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_the_field_and_what_is_wrong(case: str) -> None:
    value, field, problem = REFUSALS[case]
    with pytest.raises(ScenarioError) as caught:
        check(value)
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert caught.value.remedy


@pytest.mark.parametrize(
    "value",
    [
        scenario(prefill(0, 1), config=replace(EAGLE, num_blocks=5)),
        scenario(prefill(0, 1), config=replace(EAGLE, max_num_tokens=8)),
        scenario(prefill(0, 1), config=replace(EAGLE, max_num_requests=2)),
        scenario(START, decode(0, agree=3), config=replace(EAGLE, num_blocks=4)),
        scenario(prefill(0, finish=(0,)), prefill(1), config=replace(EAGLE, num_blocks=3)),
        scenario(prefill(0, fault=fault()), prefill(1), config=replace(EAGLE, num_blocks=3)),
        scenario(dummies(4), config=replace(EAGLE, max_seq_len=10)),
    ],
    ids=["pages", "tokens", "rows", "own pages", "pages of a finished one", "pages of a failed one", "length"],
)
def test_what_just_fits_is_possible(value: Scenario) -> None:
    assert check(value) is value
