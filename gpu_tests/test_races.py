"""Copies that are still queued while the host goes on, shown with a stalled stream.

What is verified:

1. The host really runs ahead: when a replay has been launched, the kernel that holds the stream since before the step
   was prepared is still running. So nothing in such a step waits for the device, and torch, told to raise where it
   synchronises, does not. In an eager step the host may wait, if only as a device takes about a thousand launches and
   no more before it has run the first; the report for CI says in which it has. Under the overlap scheduler a step is
   held until the one after it has been launched, so that the host prepares a step while all copies of the last one are
   still queued.
2. No host buffer is rewritten before its copy has run: with each step stalled, text, accepted counts and every pool
   end up as without a stall, for every worker, backend and part that adds buffers.
3. A defect that only a device shows is shown: tokens staged in one reused host buffer (PR #15546) pass on the CPU
   emulation, and with a stalled stream drafts are what was staged last.
4. TRT-93 (PR #14008), drafting on the host's lengths while their copy is queued, changes text with a stalled stream.
5. Outputs that the host reads without waiting (``not-yet``) are others with a stalled stream.
6. TRT-90 and TRT-91 (PR #15546, #16088), block tables that the next step rewrites while they are copied, change what
   is cached or said when the step before is held, and nothing when none is. TRT-150, corrections that a graph does not
   make or reads where they were at its capture, changes it either way.
7. After each test the device still computes.

Each run takes half of the cases, the next day's the others (``--whole``: all).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from engines.portable import PortableSession
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from gpu_tests.driving import CASES, IDS, executor, life, opened, overriding, runner
from museum import BUGS, seeded
from scenarios import Phase, Scenario
from tests.museum.scenario_of import scenario_of

CYCLES = 3_000_000_000
"""More than a second: what a host that waits has to wait."""

cases = pytest.mark.parametrize(("worker", "name"), CASES, ids=IDS)


def entries(*prefixes: str) -> list[str]:
    """Seeded defects of these museum entries, which race with what the host writes."""
    return [bug for bug in BUGS if bug.startswith(prefixes) and bug not in READ_EARLY]


READ_EARLY = [bug for bug in BUGS if bug.startswith("TRT-91/") and bug.endswith("/not-yet")]
"""These race with what the host reads."""


@dataclass
class Ends:
    """What a run ends with: outcomes, text and accepted counts of each step, the tables it went by, and all pools."""

    steps: list[tuple[str, dict[int, list[int]], dict[int, int]]]
    tables: list[torch.Tensor]
    """Block tables of all metadata after each step, as the device has them by then."""
    pools: list[torch.Tensor]
    waited: list[int]
    """Steps in which the host has waited for the device."""

    def differ_from(self, other: Ends) -> list[str]:
        """What differs."""
        found = [f"step {i}" for i, (a, b) in enumerate(zip(self.steps, other.steps, strict=True)) if a != b]
        for name in ("tables", "pools"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            found += [f"{name}[{i}]" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        return found


def live(scenario: Scenario, device: str = "cuda", *, stalled: bool = False, strict: bool = False) -> Ends:
    """Run the scenario unobserved, as whoever reads a device waits for it; with each step stalled, or none.

    strict  where torch waits in a replay, if it is stalled, it raises there: the step fails
    """
    with opened(scenario, device, observe=False) as session:
        steps, tables = [], []
        stall = _Stall(session, strict=strict) if stalled else None
        for index, step in enumerate(scenario.steps):
            if stall is not None:
                stall.index = index
            outcome = session.step(step).outcome
            requests = executor(session).active_requests
            texts = {i: list(r.generated) for i, r in requests.items()}
            counts = {i: r.py_num_accepted_draft_tokens for i, r in requests.items()}
            steps.append((outcome, texts, counts))
            tables += block_tables(session)
        session.trace()
        texts = {i: list(r.generated) for i, r in executor(session).active_requests.items()}
        steps.append(("end", texts, {}))
        pools = [manager.kv_cache_pools.cpu() for manager in executor(session).kv_cache_managers]
        return Ends(steps, [table.cpu() for table in tables], pools, [] if stall is None else stall.waited)


@torch.inference_mode()
def block_tables(session: PortableSession) -> list[torch.Tensor]:
    """Copies of them, in the order of the stream: nobody waits."""
    graphs = [graph.attn_metadata for graph in runner(session).graphs.values()]
    owners = [owner for owner in (session.attn_metadata, *graphs) if hasattr(owner, "kv_cache_block_offsets")]
    return [owner.kv_cache_block_offsets.clone() for owner in owners]


@dataclass(frozen=True, eq=False)
class _Held:
    """A step that is held.

    go        the host's flag for its kernel
    gone      behind that kernel
    may_fill  whether the step's own launches may fill the device's queue: a graph is a few, an eager step hundreds
    """

    go: torch.Tensor
    gone: torch.cuda.Event
    may_fill: bool


@contextmanager
def _raising_where_torch_waits() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The mode is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Stall:
    """Holds the stream ahead of each step until its forward has been launched, if nobody waits for the stream.

    Under the overlap scheduler until that of the next one has been. ``torch.cuda._sleep`` would do for a time that has
    to be guessed; this kernel looks at a flag of the host, and gives up on a host that waits.
    """

    def __init__(self, session: PortableSession, *, strict: bool = False) -> None:
        self.index = 0
        """Of the step that runs."""
        self.waited: list[int] = []
        self._held: list[_Held] = []
        engine: Any = executor(session)
        run_batch, forward = engine._run_batch, engine.model_engine.forward

        def stalled(iteration: Any) -> None:
            if iteration.phase.is_startup or not iteration.batch.all_requests():
                # A capture waits for the device before it begins; without a batch the host waits for the last one.
                self._let_go()
            else:
                if engine.disable_overlap_scheduler:
                    torch.cuda.synchronize()
                self._hold(may_fill=iteration.phase is Phase.EAGER)
            run_batch(iteration)

        def launched(*args: Any, **kwargs: Any) -> Any:
            try:
                with _raising_where_torch_waits() if strict and kwargs["use_cuda_graph"] else nullcontext():
                    outputs = forward(*args, **kwargs)
                if self._waited():
                    self.waited.append(self.index)
            finally:
                self._let_go(keep=0 if engine.disable_overlap_scheduler else 1)
            return outputs

        engine._run_batch, engine.model_engine.forward = stalled, launched

    def _waited(self) -> bool:
        """Whether the host has waited for the step that it has launched, or for the one before it.

        Not for an eager one before it: whoever finds the queue full of its launches waits for room, and for nothing.
        """
        return any(held.gone.query() for held in self._held if held is self._held[-1] or not held.may_fill)

    def _hold(self, *, may_fill: bool) -> None:
        go, gone = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Event()
        hold()((1, 1, 1), (1, 1, 1), (go,))
        gone.record()
        self._held.append(_Held(go, gone, may_fill))

    def _let_go(self, keep: int = 0) -> None:
        """Let all steps but the last ``keep`` run, and forget those that have run already."""
        for held in self._held[: len(self._held) - keep]:
            held.go.fill_(1)
        self._held = [held for held in self._held[len(self._held) - keep :] if not held.gone.query()]


@cache
def hold() -> Any:
    """A kernel that runs until the host's flag is set, or until ``CYCLES`` have passed."""
    source = f"""extern "C" __global__ void hold(volatile int* go) {{
        for (long long begin = clock64(); !*go && clock64() - begin < {CYCLES}ll;) __nanosleep(1000);
    }}"""
    return torch.cuda._compile_kernel(source, "hold")


@pytest.mark.turns(2)
@cases
def test_a_stalled_stream_changes_nothing(
    worker: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    scenario = overriding(life(worker, name))
    stalled = live(scenario, stalled=True, strict=True)
    assert stalled.differ_from(live(scenario)) == []
    replays = {i for i, step in enumerate(scenario.steps) if step.phase is Phase.REPLAY}
    assert not replays & set(stalled.waited)
    record_property("eager steps in which the host has waited", stalled.waited)


def test_a_reused_staging_buffer_is_seen_on_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = life("Eagle3OneModelWorker", "TRTLLM")
    right, on_cpu = live(scenario, stalled=True), live(scenario, "cpu")
    buffers = {"cpu": torch.zeros(1 << 10, dtype=torch.int32)}
    buffers["cuda"] = buffers["cpu"].pin_memory()
    upload = PyTorchModelEngine._upload

    def reused(self: PyTorchModelEngine, name: str, values: list[int]) -> torch.Tensor:
        # Tokens alone, as a token that takes the place of an index would cost the device.
        if name not in ("input_ids_cuda", "draft_tokens_cuda"):
            return upload(self, name, values)
        buffer: torch.Tensor = getattr(self, name)
        staged = buffers[self.device.type][: len(values)].copy_(torch.tensor(values, dtype=torch.int32))
        return buffer[: len(values)].copy_(staged, non_blocking=True)

    monkeypatch.setattr(PyTorchModelEngine, "_upload", reused)
    assert live(scenario, "cpu").differ_from(on_cpu) == []
    assert live(scenario, stalled=True).differ_from(right)


@pytest.mark.parametrize("bug", entries("TRT-93/"))
def test_lengths_overwritten_while_their_copy_is_queued_change_text(bug: str) -> None:
    scenario = life(BUGS[bug].worker, "TRTLLM")
    right = live(scenario, stalled=True)
    with seeded(bug):
        assert live(scenario, stalled=True).differ_from(right)


@pytest.mark.parametrize("bug", entries("TRT-90/", "TRT-91/"))
def test_tables_rewritten_while_a_step_in_flight_copies_them_are_others(bug: str) -> None:
    scenario = scenario_of(BUGS[bug])
    assert scenario.config.overlap
    right, on_cpu = live(scenario, stalled=True), live(scenario, "cpu")
    with seeded(bug):
        assert live(scenario, "cpu").differ_from(on_cpu) == []
        assert any("tables" in what for what in live(scenario, stalled=True).differ_from(right))


@pytest.mark.parametrize("bug", READ_EARLY)
def test_outputs_read_before_they_arrive_are_others(bug: str) -> None:
    scenario = scenario_of(BUGS[bug])
    assert scenario.config.overlap
    right, on_cpu = live(scenario, stalled=True), live(scenario, "cpu")
    with seeded(bug):
        assert live(scenario, "cpu").differ_from(on_cpu) == []
        assert live(scenario, stalled=True).steps != right.steps


@pytest.mark.parametrize("bug", [bug for bug in entries("TRT-150/") if BUGS[bug].kind == "K10"])
def test_corrections_that_a_graph_does_not_follow_change_what_is_served(bug: str) -> None:
    scenario = scenario_of(BUGS[bug])
    right = live(scenario, stalled=True)
    assert right.differ_from(live(scenario)) == []
    with seeded(bug):
        assert live(scenario, stalled=True).differ_from(right)
