"""What the benchmarks of a device do and count, where the device is the CPU; what they measure is no concern here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import repeat

import pytest

pytest.importorskip("torch")

import reference
from benchmarks.gpu import long_run
from benchmarks.gpu.drawn import drawn
from benchmarks.gpu.long_run import DIMENSIONS, PLAIN, Memory, Share, faults, share
from benchmarks.gpu.serving import serving
from benchmarks.gpu.verified_replay import Run, compared
from scenarios import BACKENDS, WORKERS, Phase
from tests.wrong_inside import WORKER, wrong_inside

DONE = Share(1000, Counter(dict.fromkeys(("replay", *DIMENSIONS), 1)), 9, 1, [], Memory(5, 3), Memory(5, 2))


@pytest.mark.exhaustive
def test_a_share_does_what_it_is_asked_for() -> None:
    done = share(process=3, steps=60, device="cpu", ends=20)
    assert done.steps >= 60
    assert (done.findings, done.readings, done.has_grown) == ([], 1, False)
    assert sum(done.of[backend] for backend in BACKENDS) == done.steps


@pytest.mark.exhaustive
def test_what_it_finds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    always = serving(WORKER, batch=4, draft_len=3, steps=3)
    monkeypatch.setattr(long_run, "endless", lambda process: repeat(always))
    with wrong_inside():
        found = share(process=0, steps=20, device="cpu", ends=5).findings
    assert len(found) == 1
    assert found[0].startswith("process 0: steps[2] draft[1] (run 0) kv_lens_cuda[")


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (DONE, []),
        (replace(DONE, steps=999), ["999 steps of 1000"]),
        (replace(DONE, of=DONE.of - Counter(overlap=1)), ["no step with overlap"]),
        (replace(DONE, findings=["a finding"]), ["a finding"]),
        (replace(DONE, readings=0), ["process 0: nothing was read"]),
        (replace(DONE, last=Memory(5, 4)), ["process 0: memory has grown"]),
        (replace(DONE, last=Memory(6, 3)), ["process 0: memory has grown"]),
    ],
)
def test_a_long_run_passes_with_all_of_its_steps_and_nothing_else(made: Share, fault: list[str]) -> None:
    assert faults([made], 1000) == fault


def test_scenarios_are_drawn_of_all_workers_and_dimensions() -> None:
    scenarios = drawn(1, 100)
    assert Counter(scenario.config.worker for scenario in scenarios) == dict.fromkeys(WORKERS, 10)
    for name in DIMENSIONS:
        assert sum(getattr(scenario.config, name) != getattr(PLAIN, name) for scenario in scenarios) > 1, name


def test_each_way_to_run_a_step_and_its_forward() -> None:
    replayed, eager = (
        serving(WORKER, batch=2, draft_len=2, steps=3, phase=phase) for phase in (Phase.REPLAY, Phase.EAGER)
    )
    for kind, scenario in (("bare", replayed), ("verified", replayed), ("synchronised", eager), ("eager", eager)):
        run = Run(scenario, reference.trace(scenario, in_graphs=True), kind, "cpu")
        for _ in scenario.steps[:-2]:
            run.step()
        times = run.time_forwards()
        run.step()
        run.step()
        assert len(times) == 2
        assert run.mismatches.read() is None


def test_pieces_beside_their_targets() -> None:
    said = compared(graph={"bare": 2.0, "verified": 3.0}, step={"bare": 2.0, "verified": 4.0, "synchronised": 16.0})
    assert said["verified_by_bare"] == {"graph": [1.5, True], "step": [2.0, False]}
    assert said["synchronised_by_verified"] == {"step": [4.0, False]}
