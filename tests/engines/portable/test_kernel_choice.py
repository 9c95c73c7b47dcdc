"""Which kernels run when: Triton's on a device, torch's where its functions are fault sites."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

from benchmarks.gpu.serving import serving
from engines import TORCH, kernels, run
from engines.portable import PortableEngine
from scenarios import Fault, FaultKind, Phase, UsageError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton seems to be installed, and its kernels compile for another device only."""
    monkeypatch.setattr(kernels, "triton_missing", lambda: None)
    monkeypatch.setattr(kernels, "_load", lambda: SimpleNamespace(INTERPRETED=False, warm_up=lambda _: None))
    monkeypatch.delenv(kernels.ENVIRONMENT, raising=False)


@pytest.mark.usefixtures("installed")
def test_tritons_on_cuda_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (kernels.default("cpu"), kernels.default("cuda")) == ("torch", "triton")
    monkeypatch.setenv(kernels.ENVIRONMENT, "torch")
    assert kernels.default("cuda") == "torch"
    monkeypatch.setenv(kernels.ENVIRONMENT, "cuda")
    with pytest.raises(UsageError, match="^SPECFUZZ_KERNELS: 'cuda' is not known; write 'torch' or 'triton'$"):
        kernels.default("cuda")


def test_torchs_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    monkeypatch.delenv(kernels.ENVIRONMENT, raising=False)
    assert kernels.default("cuda") == "torch"
    monkeypatch.setenv(kernels.ENVIRONMENT, "triton")
    with pytest.raises(UsageError, match="^SPECFUZZ_KERNELS: triton is not installed; install it, or write 'torch'$"):
        kernels.default("cuda")


@pytest.mark.usefixtures("installed")
def test_nothing_is_left_of_a_choice() -> None:
    with pytest.raises(ZeroDivisionError), kernels.using("triton"):
        assert kernels.triton_for(torch.zeros(1)) is None, "compiled kernels are none for the CPU"
        raise ZeroDivisionError
    with mock.patch.object(kernels, "_load") as load:
        assert kernels.triton_for(torch.zeros(1)) is None
    load.assert_not_called()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("record", "site", "chosen"),
    [
        ((), None, "triton"),
        ((TORCH,), None, "torch"),
        ((), "torch.cat", "torch"),
        ((), "draft_model.forward", "triton"),
    ],
)
def test_torchs_in_a_step_whose_torch_functions_are_sites(
    record: tuple[str, ...], site: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "default", lambda _: "triton")
    scenario = serving("Eagle3OneModelWorker", batch=1, draft_len=1, steps=1, phase=Phase.EAGER)
    fault = None if site is None else Fault(site=site, occurrence=1, kind=FaultKind.OOM)
    scenario = replace(scenario, steps=(replace(scenario.steps[0], fault=fault),))
    with mock.patch.object(kernels, "using", wraps=kernels.using) as using:
        [taken] = run(PortableEngine(), scenario, observe=False, record=record).steps
    assert taken.outcome == ("ok" if site is None else "tolerated")
    using.assert_called_once_with(chosen)
