"""Copies that are still queued while the host goes on, shown with a stalled stream.

What is verified:

1. The host really runs ahead: when a step's forward has been launched, the kernel that stalls the stream since before
   the step was prepared is still running. So nothing in a step waits for the device, be it eager or a replay.
2. No host buffer is rewritten before its copy has run: with each step stalled, text, accepted counts and every pool
   end up as without a stall, for every worker, backend and part that adds buffers.
3. A defect that only a device shows is shown: a page table staged in one reused host buffer for target and drafter
   (as in PR #15546) passes on the CPU emulation, and with a stalled stream requests read pages of the wrong cache.
4. TRT-93 (PR #14008), drafting on the host's lengths while their copy is queued, changes text with a stalled stream.
5. After each test the device still computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engines.portable import PortableSession
from engines.portable.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2
from gpu_tests.driving import CASES, IDS, executor, life, opened, overriding
from museum import BUGS, seeded
from scenarios import Scenario

CYCLES = 100_000_000
"""Some fifty milliseconds, many times what the host needs for a step."""

cases = pytest.mark.parametrize(("worker", "name"), CASES, ids=IDS)


@pytest.fixture(autouse=True)
def _device_survives() -> Iterator[None]:
    yield
    assert torch.arange(4, device="cuda").sum().item() == 6


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
    """Puts a kernel that sleeps ahead of each step, and looks whether it still does once the forward is launched."""

    def __init__(self, session: PortableSession) -> None:
        self.was_ahead = False
        engine: Any = executor(session)
        run_batch, forward = engine._run_batch, engine.model_engine.forward

        def stalled(iteration: Any) -> None:
            torch.cuda._sleep(CYCLES)
            self._awake = torch.cuda.Event()
            self._awake.record()
            run_batch(iteration)

        def launched(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            self.was_ahead = not self._awake.query()
            return outputs

        engine._run_batch, engine.model_engine.forward = stalled, launched


@cases
def test_a_stalled_stream_changes_nothing(worker: str, name: str) -> None:
    scenario = overriding(life(worker, name))
    stalled = live(scenario, stalled=True)
    assert stalled.differ_from(live(scenario)) == []
    # A capture warms up and captures, which waits; all that is served does not.
    assert [i for i in stalled.waited if not scenario.steps[i].phase.is_startup] == []


def test_a_reused_staging_buffer_is_seen_on_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = life("Eagle3OneModelWorker", "separate", host_offload=False)
    right, on_cpu = live(scenario, stalled=True), live(scenario, "cpu")
    get_block_table = KVCacheManagerV2.get_block_table
    buffers = {"cpu": torch.zeros(1 << 14, dtype=torch.int32)}
    buffers["cuda"] = buffers["cpu"].pin_memory()

    def reused(self: KVCacheManagerV2, request_ids: Sequence[int]) -> torch.Tensor:
        table = get_block_table(self, request_ids)
        return buffers[self.device.type][: table.numel()].view(table.shape).copy_(table)

    monkeypatch.setattr(KVCacheManagerV2, "get_block_table", reused)
    assert live(scenario, "cpu").differ_from(on_cpu) == []
    assert live(scenario, stalled=True).differ_from(right)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.startswith("TRT-93/")])
def test_lengths_overwritten_while_their_copy_is_queued_change_text(bug: str) -> None:
    scenario = life(BUGS[bug].worker, "TRTLLM")
    right = live(scenario, stalled=True)
    with seeded(bug):
        assert live(scenario, stalled=True).differ_from(right)
