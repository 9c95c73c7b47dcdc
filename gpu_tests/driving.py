"""Scenarios with graphs for every worker and backend, and sessions that a test may reach into between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from engines.portable import PortableEngine, PortableSession
from engines.portable.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from scenarios import (
    BACKENDS,
    WORKERS,
    Config,
    Context,
    Generation,
    Phase,
    Request,
    Scenario,
    ScenarioError,
    Step,
    Substep,
    Trace,
    check,
)

DEVICE = "cuda"
"""Where sessions are opened unless they are told; looked up then, so that the machinery here can be tried on a CPU."""
K: Final = 3
OWN: Final = {"identity", "worker_state"}
"""Labels of tensor objects, which differ from run to run."""

RECORDED: Final = ("kv_lens_cuda", "ctx_len", "force_accept_counter", "matchers", "relaxed_delta_left")
"""What a capture that fails has recorded and not done, and its emulation has done."""

Between = Callable[[PortableSession, Step], None]
Override = dict[str, Any]

_OF_BACKEND: Final[dict[str, Override]] = {
    "DSA": {"index_topk": 4},
    "DEEPSEEK_V4": {"index_topk": 2, "window_size": 3, "compress_ratios": (1, 4, 5), "tokens_per_block": 20},
}
"""What a backend needs beside its name."""
_SEPARATE: Final = {"use_separate_draft_kv_cache": True, "draft_num_blocks": 96, "draft_tokens_per_block": 3}
_ONCE: Final = ("TRTLLM", "VANILLA", "tensor-parallel")
"""What has no second case with a step in flight, which is ``overlap`` by itself."""


def overrides(worker: str) -> dict[str, Override]:
    """Configurations of a worker, each backend and each part that adds buffers, in a short form, and with overlap."""
    found = _overrides(worker)
    overlapping = {f"overlap-{name}": {**found[name], "overlap": True} for name in found if name not in _ONCE}
    return {**found, "overlap": {"overlap": True, "kv_cache_manager": "V2"}, **overlapping}


def _overrides(worker: str) -> dict[str, Override]:
    traits = WORKERS[worker]
    found: dict[str, Override] = {}
    for name in BACKENDS:
        found[name] = {"attention_backend": name, **_OF_BACKEND.get(name, {})}
    if traits.separate_draft_kv_cache:
        found["separate"] = {**_SEPARATE, "kv_cache_manager": "V2", "host_offload": True}
    if traits.guides_drafts:
        found["guided"] = {"guided_decoding": True}
    if traits.sa_enhancer:
        found["enhancer"] = {"sa_threshold": 2}
    if traits.reuses_blocks:
        found["reuse"] = {"enable_block_reuse": True}
    if traits.recurrent:
        found["recurrent"] = {"recurrent": True}
    if traits.rejection_sampling:
        found["rejection"] = {"rejection_sampling": True}
    if traits.ragged_verify:
        found["ragged"] = {"ragged_verify": True}
        found["ragged-DSA"] = {**found["DSA"], "ragged_verify": True}
    if traits.shares_draft_head:
        found["tensor-parallel"] = {"tp_size": 2, "tp_rank": 1}
    return found


def config(worker: str, name: str, **more: Any) -> Config:
    """The configuration of that name."""
    tree = {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": K + 2} if WORKERS[worker].tree else {}
    return Config(worker=worker, max_draft_len=K, **{**tree, **overrides(worker)[name], **more})


def dummies(worker: str, *pasts: int) -> tuple[Generation, ...]:
    """Generations to capture a graph with; they accept different counts, where dummies accept any."""
    accepts = (1,) * len(pasts) if WORKERS[worker].tree else tuple(1 + (K - i) % (K + 1) for i in range(len(pasts)))
    return tuple(Generation(request=None, past=past, accept=n) for past, n in zip(pasts, accepts, strict=True))


def generation(request: int, agree: int, match: int = 0) -> Generation:
    """A row that generates."""
    return Generation(request=request, agree=agree, match=match)


WIDTHS: Final = ((K, 1), (2, 2), (1, K))
"""Drafts that the generations of a step verify, turn by turn: as many altogether."""


def _with_widths(step: Step, widths: tuple[int, int]) -> Step:
    rows = zip(step.generations, widths)
    return replace(step, generations=tuple(replace(row, verify=n, accept=min(row.accept, n + 1)) for row, n in rows))


def life(worker: str, name: str, **more: Any) -> Scenario:
    """A graph of two rows, captured, and replayed for three pairs of requests; other batches come in between.

    Requests differ in length, pages and accepted counts; pairs change places. With block reuse the last one begins with
    the pages of one that runs; with verify widths a graph has rows of other requests than at its capture.
    """
    settings, agree = config(worker, name, **more), K if WORKERS[worker].drafts_for_contexts else 0
    last = Request(id=3, prompt_len=4)
    if settings.enable_block_reuse:
        last = Request(id=3, prompt_len=9, prefix_of=2, prefix_len=9)
    steps = (
        Step(draft_len=K, phase=Phase.CAPTURE, generations=dummies(worker, 10, 20)),
        Step(
            draft_len=K,
            contexts=tuple(Context(request=i, chunk=n, agree=min(agree, i)) for i, n in enumerate((5, 3, 9))),
        ),
        Step(draft_len=K, phase=Phase.REPLAY, generations=(generation(0, 1), generation(2, K))),
        Step(draft_len=K, phase=Phase.REPLAY, generations=(generation(1, 2), generation(0, K))),
        Step(
            draft_len=K,
            contexts=(Context(request=3, chunk=last.prompt_len, agree=agree),),
            generations=(generation(2, 2), generation(1, K)),
        ),
        Step(draft_len=K, phase=Phase.REPLAY, generations=(generation(3, K), generation(2, 0)), finish=(2,)),
        Step(draft_len=K, phase=Phase.REPLAY, generations=(generation(1, 0), generation(3, 1))),
    )
    if settings.ragged_verify:
        steps = tuple(_with_widths(step, WIDTHS[i % len(WIDTHS)]) for i, step in enumerate(steps))
    requests = (*(Request(id=i, prompt_len=n) for i, n in enumerate((5, 3, 9))), last)
    return check(Scenario(config=settings, requests=requests, steps=steps))


def overriding(scenario: Scenario) -> Scenario:
    """The scenario with a suffix automaton that takes over in every second row, where there is one."""
    if not scenario.config.sa_threshold:
        return scenario
    steps = tuple(
        step
        if step.phase.is_startup
        else replace(step, generations=tuple(replace(g, match=3 * (i % 2)) for i, g in enumerate(step.generations)))
        for step in scenario.steps
    )
    return check(replace(scenario, steps=steps))


def _has_life(worker: str, name: str) -> bool:
    """Whether the worker runs on that backend, and the backend in graphs."""
    try:
        return bool(life(worker, name).steps)
    except ScenarioError:
        return False


CASES: Final = [(worker, name) for worker in WORKERS for name in overrides(worker) if _has_life(worker, name)]
"""Worker, and name of a configuration."""
IDS: Final = [f"{worker}-{name}" for worker, name in CASES]


@contextmanager
def opened(scenario: Scenario, device: str | None = None, *, observe: bool = True) -> Iterator[PortableSession]:
    """A session of the portable engine for the scenario."""
    session = PortableEngine(device or DEVICE).open(scenario.config, scenario.requests, observe=observe)
    try:
        yield session
    finally:
        session.close()


def drive(scenario: Scenario, before: Between | None = None) -> Trace:
    """Run the scenario, to its end or to a fatal step; ``before`` is called ahead of each step."""
    with opened(scenario) as session:
        for step in scenario.steps:
            if before is not None:
                before(session, step)
            if session.step(step).outcome == "fatal":
                break
        return session.trace()


def executor(session: PortableSession) -> Any:
    """What the session drives."""
    return session._executor


def runner(session: PortableSession) -> CUDAGraphRunner:
    """Its graphs."""
    found: CUDAGraphRunner = executor(session).model_engine.cuda_graph_runner
    return found


def fields(substep: Substep, *left_out: str) -> dict[str, Any]:
    """What was seen, without what differs from run to run."""
    return {name: value for name, value in substep.fields.items() if name not in (*OWN, *left_out)}


def differences(one: Trace, other: Trace, first: int = 0, left_out: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
    """Where two runs differ, from step ``first`` on: step, sub-step, field and both values."""
    found: list[tuple[Any, ...]] = []
    for a, b in zip(one.steps[first:], other.steps[first:], strict=True):
        places = [[(s.key, s.phase) for s in step.substeps] for step in (a, b)]
        if (a.outcome, places[0]) != (b.outcome, places[1]):
            found.append((a.index, a.outcome, places[0], b.outcome, places[1]))
            continue
        for s, t in zip(a.substeps, b.substeps, strict=True):
            left, right = fields(s, *left_out), fields(t, *left_out)
            found += [
                (a.index, s.key, name, left.get(name), right.get(name))
                for name in (left | right)
                if left.get(name) != right.get(name)
            ]
    return found


def differing(on_cuda: Trace, on_cpu: Trace) -> list[tuple[Any, ...]]:
    """Where a run on CUDA differs from its emulation: what could be seen there has the value of the CPU.

    While a graph is captured nothing on the device can be read.
    """
    found: list[tuple[Any, ...]] = []
    for a, b in zip(on_cuda.steps, on_cpu.steps):
        places = [[s.key for s in step.substeps] for step in (a, b)]
        if (a.outcome, places[0]) != (b.outcome, places[1]):
            return [*found, (a.index, a.outcome, places[0], b.outcome, places[1])]
        for s, t in zip(a.substeps, b.substeps, strict=True):
            left_out = RECORDED if (s.name, a.phase) == ("failed", Phase.CAPTURE) else ()
            seen, expected = fields(s, *left_out), fields(t, *left_out)
            names = seen if s.phase == "capture" else seen | expected
            found += [
                (a.index, s.key, name, seen.get(name), expected.get(name))
                for name in names
                if name not in expected or seen.get(name) != expected[name]
            ]
    return found if len(on_cuda.steps) == len(on_cpu.steps) else [*found, (len(on_cuda.steps), len(on_cpu.steps))]
