"""The exceptions that are raised in the code under test."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from faults import InjectedFault, Seam, SiteClass, Sites, injected, is_injected, raised_at
from scenarios import Fault, FaultKind


def fault(kind: FaultKind) -> Fault:
    return Fault(site="draft_model.forward", occurrence=3, kind=kind)


def test_out_of_memory_is_torch_s_own_class() -> None:
    torch = pytest.importorskip("torch", reason="the class is torch's")
    error = injected.make(fault(FaultKind.OOM))
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, InjectedFault)
    assert str(error) == "CUDA out of memory. (injected at draft_model.forward@3:oom)"


def test_a_cuda_error_looks_like_one() -> None:
    torch = pytest.importorskip("torch", reason="the class is torch's")
    error = injected.make(fault(FaultKind.CUDA))
    assert isinstance(error, getattr(torch, "AcceleratorError", RuntimeError))
    assert not isinstance(error, torch.OutOfMemoryError)
    assert str(error).startswith("CUDA error: ")
    assert getattr(error, "error_code") == 700  # noqa: B009 - a field of some versions of the real class


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_is_a_runtime_error_with_its_site(kind: FaultKind) -> None:
    error = injected.make(fault(kind))
    assert isinstance(error, RuntimeError)
    assert (error.site, error.occurrence, error.kind) == ("draft_model.forward", 3, kind)
    assert injected.make(fault(kind)) is not error


def test_a_plain_error_is_neither_of_torch_s() -> None:
    assert [c.__name__ for c in type(injected.make(fault(FaultKind.ERROR))).__mro__[:3]] == [
        "InjectedError",
        "InjectedFault",
        "RuntimeError",
    ]


@pytest.mark.parametrize("torch", [None, ModuleType("torch")], ids=["no torch", "old torch"])
def test_runtime_error_stands_in_for_classes_that_torch_lacks(
    torch: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert injected._real("AcceleratorError") is RuntimeError


def test_real_errors_are_not_injected() -> None:
    assert is_injected(injected.make(fault(FaultKind.ERROR)))
    assert not is_injected(RuntimeError("CUDA out of memory."))
    assert not is_injected(None)


def test_an_error_caused_by_an_injected_one_is_not_injected() -> None:
    error = RuntimeError("wrapped")
    error.__cause__ = injected.make(fault(FaultKind.ERROR))
    assert not is_injected(error)


class Model:
    def forward(self) -> None:
        self.inner()

    def inner(self) -> None:
        raise ValueError("no inner model")


def line_of(function: str, text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f"def {function}(" in line)
    return next(i for i, line in enumerate(lines[start:], start + 1) if text in line)


def test_raised_at_is_the_caller_of_the_seam() -> None:
    model = Model()
    plan = Fault(site="model.inner", occurrence=1, kind=FaultKind.ERROR)
    sites = Sites([Seam("model.inner", model, "inner", SiteClass.LAUNCH)])
    with pytest.raises(InjectedFault) as caught, sites, sites.bracket(plan):
        model.forward()
    assert raised_at(caught.value) == f"{relative(__file__)}:{line_of('forward', 'self.inner()')}"


def test_raised_at_of_a_real_error_is_where_it_was_raised() -> None:
    model = Model()
    sites = Sites([Seam("model.inner", model, "inner", SiteClass.LAUNCH)])
    with pytest.raises(ValueError, match="no inner model") as caught, sites, sites.bracket():
        model.forward()
    assert raised_at(caught.value) == f"{relative(__file__)}:{line_of('inner', 'raise ValueError')}"


def test_raised_at_keeps_a_path_outside_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no inner model") as caught:
        Model().forward()
    assert raised_at(caught.value) == f"{__file__}:{line_of('inner', 'raise ValueError')}"


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert raised_at(ValueError()) is None


def relative(path: str) -> str:
    return os.path.relpath(path)


def test_raised_at_passes_over_torch() -> None:
    torch = pytest.importorskip("torch", reason="the frames are torch's")

    class Layer(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self) -> None:
            """A call seam."""

    layer = Layer()
    seam = Seam("layer.forward", layer, "forward", SiteClass.LAUNCH)
    fault = Fault(site="layer.forward", occurrence=1, kind=FaultKind.ERROR)
    with Sites([seam]) as sites, pytest.raises(InjectedFault) as caught, sites.bracket(fault):
        layer()
    assert raised_at(caught.value) == f"{relative(__file__)}:{line_of('test_raised_at_passes_over_torch', 'layer()')}"


def test_raised_at_passes_over_modes_that_see_torch_calls() -> None:
    torch = pytest.importorskip("torch", reason="the modes are torch's")

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined, misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with pytest.raises(RuntimeError, match="size") as caught, Mode():
        torch.zeros(2).add(torch.zeros(3))
    this = "test_raised_at_passes_over_modes_that_see_torch_calls"
    assert raised_at(caught.value) == f"{relative(__file__)}:{line_of(this, 'zeros(2)')}"
