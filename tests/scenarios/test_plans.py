"""Which lengths follow from a scenario, and what is left of a request and of a run after each step."""

from __future__ import annotations

from dataclasses import replace

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
    walk,
)
from tests.scenarios.story import EAGLE, PARD, REQUESTS, START, decode, dummies, fault, prefill, scenario


def plans(value: Scenario) -> list[list[tuple[int, int, int, int]]]:
    """(past, query, accepted, granted) of each row of each step."""
    return [[(r.past, r.query, r.accepted, r.granted) for r in rows] for _, rows in walk(value)]


class TestLengths:
    def test_a_linear_worker_by_hand(self) -> None:
        # extra 2, width K: 5 + 2 + 3 granted at first; then + 1 + K, and K - (accepted - 1) rewound.
        value = scenario(prefill(0, agree=2), decode(0, agree=3), decode(0, agree=0), decode(0))
        assert plans(value) == [
            [(0, 5, 1, 10)],
            [(5, 4, 3, 14)],
            [(8, 4, 4, 17)],
            [(12, 4, 1, 21)],
        ]

    def test_a_parallel_worker_by_hand(self) -> None:
        # Width 2K - 1 and 2K rows per generation; contexts make no drafts, so the first generation accepts one.
        value = scenario(prefill(0), decode(0, agree=2), decode(0), config=PARD)
        assert plans(value) == [
            [(0, 5, 1, 12)],
            [(5, 6, 1, 18)],
            [(6, 6, 3, 19)],
        ]

    def test_accepted_is_bounded_by_drafts_made_agreed_and_verified(self) -> None:
        value = scenario(prefill(0, k=1, agree=1), decode(0, k=3, agree=3), decode(0, k=2, agree=2), decode(0, k=0))
        assert [rows[0][2] for rows in plans(value)] == [1, 2, 3, 1]

    def test_contexts_of_a_parallel_worker_have_no_drafts(self) -> None:
        made = {}
        for config in (EAGLE, PARD):
            schedule = Schedule(config, REQUESTS)
            schedule.advance(START)
            made[config.worker] = schedule.requests[0].drafts
        assert made == {"Eagle3OneModelWorker": 3, "PARDWorker": 0}

    def test_no_drafts_are_left_after_a_step_of_draft_length_0(self) -> None:
        value = scenario(prefill(0, agree=3), decode(0, k=0), decode(0, agree=3))
        assert [rows[0][2] for rows in plans(value)] == [1, 1, 1]

    def test_a_prompt_in_chunks_is_granted_once(self) -> None:
        chunks = [Step(draft_len=k, contexts=(Context(request=0, chunk=n),)) for k, n in ((3, 2), (1, 2), (2, 1))]
        assert plans(scenario(*chunks, decode(0))) == [
            [(0, 2, 0, 10)],
            [(2, 2, 0, 10)],
            [(4, 1, 1, 10)],
            [(5, 4, 1, 14)],
        ]

    def test_dummies(self) -> None:
        step = Step(
            phase=Phase.WARMUP,
            draft_len=2,
            contexts=(Context(request=None, chunk=6),),
            generations=(Generation(request=None, past=4, accept=3),),
        )
        assert plans(scenario(step)) == [[(0, 6, 1, 10), (4, 3, 3, 9)]]

    def test_a_replay_is_planned_like_an_eager_step(self) -> None:
        eager, replay = (
            plans(scenario(dummies(2), START, decode(0, phase=phase))) for phase in (Phase.EAGER, Phase.REPLAY)
        )
        assert eager == replay


class TestState:
    def test_waiting_and_generating(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        assert (schedule.waiting, schedule.generating, schedule.blocks_in_use) == ([0, 1], [], (0,))
        schedule.advance(prefill(0))
        assert (schedule.waiting, schedule.generating, schedule.blocks_in_use) == ([1], [0], (3,))
        schedule.advance(prefill(1, finish=(0,)))
        assert (schedule.waiting, schedule.generating, schedule.blocks_in_use) == ([], [1], (2,))

    def test_every_pool_admits(self) -> None:
        """One page per token: the prompt of 5, two extra tokens and three drafts."""
        config = replace(EAGLE, use_separate_draft_kv_cache=True, draft_num_blocks=10, draft_tokens_per_block=1)
        schedule = Schedule(config, REQUESTS)
        with pytest.raises(ScenarioError, match="18 KV-cache pages exceed draft_num_blocks 10"):
            schedule.advance(prefill(0, 1))
        schedule.advance(START)
        assert schedule.blocks_in_use == (3, 10)

    def test_dummies_leave_nothing_behind(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        schedule.advance(dummies(2, 5))
        assert (schedule.blocks_in_use, schedule.graphs, schedule.serving) == ((0,), {(2, 3, 8)}, False)
        schedule.advance(START)
        assert schedule.serving

    def test_planning_changes_nothing(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        schedule.advance(prefill(0, agree=2))
        assert schedule.plan(decode(0)) == schedule.plan(decode(0)) == schedule.advance(decode(0))

    def test_a_fork_goes_its_own_way(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        schedule.advance(dummies(2))
        schedule.advance(START)
        fork = schedule.fork()
        fork.advance(decode(0, phase=Phase.REPLAY, fault=fault()))
        assert (schedule.failures, schedule.generating) == (0, [0])
        assert (fork.failures, fork.generating) == (1, [])
        fork.advance(prefill(1, fault=fault(FaultKind.CUDA)))
        assert (schedule.over, fork.over) == (False, True)
        schedule.add(Request(id=9, prompt_len=1))
        assert 9 not in fork.requests

    def test_a_fork_stands_where_the_original_stood(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        schedule.advance(dummies(2))
        schedule.advance(prefill(0, fault=fault()))
        schedule.advance(prefill(1, fault=fault(FaultKind.CUDA)))
        assert vars(schedule.fork()) == vars(schedule)
        assert (schedule.failures, schedule.serving, schedule.over) == (1, True, True)


class TestFailures:
    @pytest.mark.parametrize("kind", FaultKind)
    @pytest.mark.parametrize(
        ("phase", "tolerated"),
        [
            (Phase.WARMUP, {FaultKind.OOM}),
            (Phase.CAPTURE, set()),
            (Phase.EAGER, {FaultKind.OOM, FaultKind.ERROR}),
            (Phase.REPLAY, {FaultKind.OOM, FaultKind.ERROR}),
        ],
    )
    def test_what_is_tolerated_in_which_phase(self, phase: Phase, tolerated: set[FaultKind], kind: FaultKind) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        if phase is Phase.REPLAY:
            schedule.advance(dummies(2))
        if phase.is_startup:
            step = dummies(2, phase=phase, fault=fault(kind))
        else:
            schedule.advance(START)
            step = decode(0, phase=phase, fault=fault(kind))
        assert schedule.tolerates(step) == (kind in tolerated)
        schedule.advance(step)
        assert schedule.over == (kind not in tolerated)

    def test_the_error_budget_counts_failed_serving_steps_only(self) -> None:
        config = replace(EAGLE, error_budget=1)
        warm = dummies(2, phase=Phase.WARMUP, fault=fault(FaultKind.OOM))
        schedule = Schedule(config, (*REQUESTS, Request(id=2, prompt_len=5)))
        schedule.advance(warm)
        schedule.advance(warm)
        schedule.advance(prefill(0, fault=fault()))
        assert not schedule.over
        schedule.advance(prefill(1, fault=fault()))
        assert schedule.over

    def test_a_failed_step_ends_every_request_that_has_started_and_those_of_the_batch(self) -> None:
        requests = (*REQUESTS, Request(id=2, prompt_len=4), Request(id=3, prompt_len=4))
        schedule = Schedule(EAGLE, requests)
        schedule.advance(START)
        schedule.advance(Step(draft_len=3, contexts=(Context(request=2, chunk=1),)))
        schedule.advance(prefill(1, fault=fault()))
        assert {i: s.active for i, s in schedule.requests.items()} == {0: False, 1: False, 2: False, 3: True}
        assert schedule.blocks_in_use == (0,)
        assert (schedule.waiting, schedule.generating) == ([3], [])

    def test_a_failed_warm_up_leaves_requests_alone(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        schedule.advance(dummies(2, phase=Phase.WARMUP, fault=fault(FaultKind.OOM)))
        assert schedule.waiting == [0, 1]
        assert not schedule.serving

    def test_a_capture_that_fails_captures_nothing(self) -> None:
        schedule = Schedule(EAGLE, REQUESTS)
        schedule.advance(dummies(2, fault=fault(FaultKind.OOM)))
        assert schedule.graphs == set()
