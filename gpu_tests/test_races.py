"""Copies that are still queued while the host goes on, shown with a stalled stream.

What is verified:

1. The host really runs ahead: when a replay has been launched, the kernel that holds the stream since before the step
   was prepared is still running. So nothing in such a step waits for the device. In an eager step the host may wait;
   the report for CI says in which it has.
2. No host buffer is rewritten before its copy has run: with each step stalled, text, accepted counts and every pool
   end up as without a stall, for every worker, backend and part that adds buffers.
3. A defect that only a device shows is shown: tokens staged in one reused host buffer (PR #15546) pass on the CPU
   emulation, and with a stalled stream drafts are what was staged last.
4. TRT-93 (PR #14008), drafting on the host's lengths while their copy is queued, changes text with a stalled stream.
5. After each test the device still computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from engines.portable import PortableSession
from engines.portable.pyexecutor.model_engine import PyTorchModelEngine
from gpu_tests.driving import CASES, IDS, executor, life, opened, overriding
from museum import BUGS, seeded
from scenarios import Phase, Scenario

CYCLES = 3_000_000_000
"""More than a second: what a host that waits has to wait."""

cases = pytest.mark.parametrize(("worker", "name"), CASES, ids=IDS)


@dataclass
class Ends:
    """What a run ends with: outcomes, text and accepted counts of each step, and all pools."""

    steps: list[tuple[str, dict[int, list[int]], dict[int, int]]]
    pools: list[torch.Tensor]
    waited: list[int]
    """Steps in which the host has waited for the device."""

    def differ_from(self, other: Ends) -> list[str]:
        """What differs."""
        found = [f"step {i}" for i, (a, b) in enumerate(zip(self.steps, other.steps, strict=True)) if a != b]
        pools = zip(self.pools, other.pools, strict=True)
        return found + [f"pool {i}" for i, (a, b) in enumerate(pools) if not torch.equal(a, b)]


def live(scenario: Scenario, device: str = "cuda", *, stalled: bool = False) -> Ends:
    """Run the scenario unobserved, as whoever reads a device waits for it; with each step stalled, or none."""
    with opened(scenario, device, observe=False) as session:
        steps, waited = [], []
        stall = _Stall(session) if stalled else None
        for index, step in enumerate(scenario.steps):
            outcome = session.step(step).outcome
            requests = executor(session).active_requests
            texts = {i: list(r.generated) for i, r in requests.items()}
            counts = {i: r.py_num_accepted_draft_tokens for i, r in requests.items()}
            steps.append((outcome, texts, counts))
            if stall is not None and not stall.was_ahead:
                waited.append(index)
        pools = [manager.kv_cache_pools.cpu() for manager in executor(session).kv_cache_managers]
        return Ends(steps, pools, waited)


class _Stall:
    """Holds the stream ahead of each step until its forward has been launched, if nobody waits for the stream.

    ``torch.cuda._sleep`` would do for a time that has to be guessed; this kernel looks at a flag of the host, and gives
    up on a host that waits.
    """

    def __init__(self, session: PortableSession) -> None:
        self.was_ahead = True
        self._gone: torch.cuda.Event | None = None
        self._go = torch.zeros(1, dtype=torch.int32).pin_memory()
        engine: Any = executor(session)
        run_batch, forward = engine._run_batch, engine.model_engine.forward

        def stalled(iteration: Any) -> None:
            if iteration.phase.is_startup:
                # A capture waits for the device before it begins.
                run_batch(iteration)
                return
            torch.cuda.synchronize()
            self._go.zero_()
            hold()((1, 1, 1), (1, 1, 1), (self._go,))
            self._gone = torch.cuda.Event()
            self._gone.record()
            run_batch(iteration)

        def launched(*args: Any, **kwargs: Any) -> Any:
            try:
                outputs = forward(*args, **kwargs)
                self.was_ahead = self._gone is None or not self._gone.query()
            finally:
                self._go.fill_(1)
            return outputs

        engine._run_batch, engine.model_engine.forward = stalled, launched


@cache
def hold() -> Any:
    """A kernel that runs until the host's flag is set, or until ``CYCLES`` have passed."""
    source = f"""extern "C" __global__ void hold(volatile int* go) {{
        for (long long begin = clock64(); !*go && clock64() - begin < {CYCLES}ll;) __nanosleep(1000);
    }}"""
    return torch.cuda._compile_kernel(source, "hold")


@cases
def test_a_stalled_stream_changes_nothing(
    worker: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    scenario = overriding(life(worker, name))
    stalled = live(scenario, stalled=True)
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


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.startswith("TRT-93/")])
def test_lengths_overwritten_while_their_copy_is_queued_change_text(bug: str) -> None:
    scenario = life(BUGS[bug].worker, "TRTLLM")
    right = live(scenario, stalled=True)
    with seeded(bug):
        assert live(scenario, stalled=True).differ_from(right)
