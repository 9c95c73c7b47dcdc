"""The Triton kernels on a CUDA device.

What is verified:

1. Each kernel gives the bits of the torch operations that it stands for, on content with places outside the tables.
2. Sessions on CUDA use them where Triton is installed, and torch's where the environment says so or torch functions
   are fault sites; a scenario gives the same trace with either (``test_portable.py`` compares it with the CPU's).
3. They are compiled before a graph is captured, also where no forward comes before the capture.
4. After each test the device still computes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.serving import serving
from engines import kernels, run
from engines.portable import PortableEngine
from scenarios import WORKERS, Scenario
from scenarios.backends import runs_on
from tests.kernel_comparisons import COMPARISONS, Comparison

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.__name__)
def test_same_bits(comparison: Comparison) -> None:
    with kernels.using("triton"):
        assert kernels.triton_for(torch.zeros(1, device="cuda")) is not None
    comparison("cuda")


def scenario_of(worker: str, backend: str) -> Scenario:
    scenario = serving(worker, batch=5, draft_len=3, steps=3, backend=backend)
    return replace(scenario, config=replace(scenario.config, graph_warmup_runs=0))


@pytest.mark.parametrize(("worker", "backend"), [(w, b) for b in ("TRTLLM", "DSA") for w in WORKERS if runs_on(w, b)])
def test_same_traces(worker: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_of(worker, backend)
    engine = PortableEngine("cuda")
    assert kernels.default("cuda") == "triton"
    with_triton = run(engine, scenario)
    monkeypatch.setenv(kernels.ENVIRONMENT, "torch")
    assert kernels.default("cuda") == "torch"
    assert run(engine, scenario).steps == with_triton.steps
