"""Steps, failures and the end of requests, as the oracle sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference import Session, trace
from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    Step,
    StepTrace,
    Substep,
    check,
)

CONFIG = Config(worker="Eagle3OneModelWorker", max_draft_len=2, error_budget=1)
REQUESTS = tuple(Request(id=i, prompt_len=3 + i) for i in range(4))
OOM = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.OOM)
CUDA = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.CUDA)


def run(*steps: Step, config: Config = CONFIG) -> tuple[StepTrace, ...]:
    return trace(check(Scenario(config=config, requests=REQUESTS, steps=steps))).steps


def prefill(*requests: int, fault: Fault | None = None) -> Step:
    contexts = tuple(Context(request=i, chunk=3 + i) for i in requests)
    return Step(draft_len=2, contexts=contexts, fault=fault)


def decode(
    *requests: int, phase: Phase = Phase.EAGER, finish: tuple[int, ...] = (), fault: Fault | None = None
) -> Step:
    generations = tuple(Generation(request=i) for i in requests)
    return Step(phase=phase, draft_len=2, generations=generations, finish=finish, fault=fault)


def startup(phase: Phase, fault: Fault | None = None) -> Step:
    return Step(phase=phase, draft_len=2, generations=(Generation(request=None, past=4),), fault=fault)


def last(step: StepTrace) -> Substep:
    return step.substeps[-1]


def test_start_up_leaves_nothing_behind() -> None:
    for step in run(startup(Phase.WARMUP), startup(Phase.CAPTURE)):
        updated = last(step)
        assert updated.name == "updated"
        assert updated["free_blocks"] == CONFIG.num_blocks
        assert not any(updated[name] for name in updated.fields if name not in ("free_blocks", "graph_key"))


def test_a_replay_shows_the_ends_of_its_forward_only() -> None:
    *_, eager, replay = run(startup(Phase.CAPTURE), prefill(0), decode(0), decode(0, phase=Phase.REPLAY))
    assert [s.name for s in replay.substeps] == ["prepared", "entered", "restored", "updated"]
    assert {s.phase for s in replay.substeps} == {"replay"}
    restored, before = replay.find("restored"), eager.find("restored")
    assert restored is not None
    assert before is not None
    assert restored["kv_lens_cuda"] == [kv + 1 for kv in before["kv_lens_cuda"]]


def test_once_per_step_and_once_per_forward() -> None:
    (step,) = run(startup(Phase.CAPTURE))
    assert [s.run for s in step.named("prepared", "updated")] == [0, 0]
    assert [s.run for s in step.named("entered")] == [s.run for s in step.named("restored")] == [0, 1, 2]


@pytest.mark.parametrize("runs", [0, 1])
def test_warm_up_forwards_before_a_capture(runs: int) -> None:
    (step,) = run(startup(Phase.CAPTURE), config=replace(CONFIG, graph_warmup_runs=runs))
    assert [s.phase for s in step.named("entered")] == ["graph_warmup"] * runs + ["capture"]


def test_only_generations_are_rewound() -> None:
    updated = last(
        run(prefill(0), Step(draft_len=2, contexts=prefill(1).contexts, generations=decode(0).generations))[-1]
    )
    assert updated["py_rewind_len"] == {0: 2}
    assert updated["py_num_accepted_draft_tokens"] == {0: 0}


def test_a_finished_request_is_listed_once_more() -> None:
    _, finishing, after = run(prefill(0, 1), decode(0, finish=(0, 1)), prefill(2))
    assert set(last(finishing)["kv_tokens"]) == {0, 1}
    assert set(last(finishing)["py_rewind_len"]) == {0}
    assert set(last(after)["kv_tokens"]) == {2}
    # 5 prompt tokens, 1 extra and 2 drafts: two pages of four tokens.
    assert last(after)["free_blocks"] == CONFIG.num_blocks - 2


def test_queued_requests_are_not_listed() -> None:
    (step,) = run(prefill(1))
    assert set(last(step)["emitted"]) == {1}


def test_a_failed_step_shows_a_clean_one_and_then_its_failure() -> None:
    clean, failing = run(prefill(0), decode(0))[-1], run(prefill(0), decode(0, fault=OOM))[-1]
    assert failing.substeps[:-1] == clean.substeps
    assert (failing.outcome, failing.fired, failing.injected) == ("tolerated", 1, True)
    assert (clean.outcome, clean.fired, clean.injected) == ("ok", 0, False)
    failed, prepared = last(failing), clean.substeps[0]
    assert failed.name == "failed"
    assert "kv_lens_cuda" not in failed
    assert "use_spec_decoding" not in failed
    names = set(failed.fields) - {"kv_tokens", "free_blocks", "held_for_nobody"}
    assert {"_seq_lens", "_seq_lens_cuda", "num_contexts", "num_tokens", "host_request_types"} <= names
    assert {n: failed[n] for n in names} == {n: prepared[n] for n in names}


def test_a_tolerated_failure_ends_what_had_started_and_what_was_in_the_batch() -> None:
    _, failing, after = run(prefill(0), prefill(1, fault=OOM), prefill(2, 3))
    assert last(failing)["kv_tokens"] == {}
    assert last(failing)["free_blocks"] == CONFIG.num_blocks
    assert set(last(after)["emitted"]) == {2, 3}


def test_what_failed_in_its_first_step_is_gone() -> None:
    session = Session(CONFIG, REQUESTS)
    session.step(prefill(1, fault=OOM))
    with pytest.raises(KeyError):
        session.step(prefill(1))


def test_failures_beyond_the_budget_are_fatal() -> None:
    steps = run(prefill(0, fault=OOM), prefill(1, fault=OOM))
    assert [step.outcome for step in steps] == ["tolerated", "fatal"]
    assert "kv_tokens" not in last(steps[-1])


def test_a_cuda_error_is_fatal_within_the_budget() -> None:
    assert run(prefill(0, fault=CUDA))[-1].outcome == "fatal"


def test_warm_up_tolerates_lack_of_memory_outside_the_budget() -> None:
    error = Fault(site="draft_model.forward", occurrence=1, kind=FaultKind.ERROR)
    steps = run(startup(Phase.WARMUP, OOM), startup(Phase.WARMUP, OOM), prefill(0, fault=error))
    assert [step.outcome for step in steps] == ["tolerated"] * 3
    assert last(steps[0])["free_blocks"] == CONFIG.num_blocks
    assert run(startup(Phase.WARMUP, error))[-1].outcome == "fatal"
    assert run(startup(Phase.CAPTURE, OOM))[-1].outcome == "fatal"


def test_a_trace_ends_with_the_fatal_step() -> None:
    steps = (prefill(0, fault=CUDA), prefill(1))
    assert len(trace(Scenario(config=CONFIG, requests=REQUESTS, steps=steps)).steps) == 1


def test_a_session_taken_step_by_step_gives_the_same_trace() -> None:
    steps = (prefill(0), decode(0, fault=OOM), prefill(1), decode(1, finish=(1,)), prefill(2))
    session = Session(CONFIG, REQUESTS[:2])
    for step in steps[:4]:
        session.step(step)
    session.add(REQUESTS[2])
    session.step(steps[4])
    expected = trace(check(Scenario(config=CONFIG, requests=REQUESTS, steps=steps)))
    assert session.trace() == expected
    assert [step.index for step in expected.steps] == [0, 1, 2, 3, 4]
