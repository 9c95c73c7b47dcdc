"""Torch functions as sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from faults import SEAMS, TORCH, InjectedFault, Seam, SiteClass, Sites, raised_at
from scenarios import Fault, FaultKind

torch = pytest.importorskip("torch", reason="torch functions need torch")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def plan(site: str, occurrence: int = 1, kind: FaultKind = FaultKind.OOM) -> Fault:
    return Fault(site=site, occurrence=occurrence, kind=kind)


def counts(action: Callable[[], Any]) -> dict[str, int]:
    with Sites() as sites, sites.bracket(record=[TORCH]) as bracket:
        action()
    return bracket.counts


x = torch.arange(6)
index = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("action", "sites"),
    [
        (lambda: torch.clone(x), {"torch.clone": 1}),
        (lambda: x.clone(), {"torch.clone": 1}),
        (lambda: torch.cat([x, x]), {"torch.cat": 1}),
        (lambda: x.clone().add_(1), {"torch.clone": 1, "torch.add_": 1}),
        (lambda: x + 1 - x, {"torch.add": 1, "torch.sub": 1}),
        (lambda: x[index], {"torch.getitem": 1}),
        (lambda: x.__setitem__(0, 0), {"torch.setitem": 1}),
        (lambda: torch.empty(3), {"torch.empty": 1}),
        (lambda: x[0].item(), {"torch.getitem": 1, "torch.item": 1}),
        (lambda: torch.ops.aten.add.Tensor(x, x), {"torch.add": 1}),
        (lambda: torch.ops.aten.add(x, x), {"torch.add": 1}),
        (lambda: torch.nn.functional.pad(x, (1, 1)), {"torch.pad": 1}),
    ],
)
def test_sites_are_named_after_the_function(action: Callable[[], Any], sites: dict[str, int]) -> None:
    assert counts(action) == sites


@pytest.mark.parametrize(
    "action",
    [
        lambda: x.shape,
        lambda: x.dtype,
        lambda: x.device,
        lambda: x.is_cuda,
        lambda: x.size(0),
        lambda: x.dim(),
        lambda: x.numel(),
        lambda: len(x),
        lambda: hash(x),
        lambda: x.data_ptr(),
        lambda: x.view(2, 3),
        lambda: x.unsqueeze(0),
        lambda: x.split(2),
    ],
)
def test_what_cannot_fail_is_no_site(action: Callable[[], Any]) -> None:
    assert counts(action) == {}


def test_the_fault_strikes_before_the_operation_at_its_occurrence() -> None:
    y = torch.zeros(2)
    with Sites() as sites, sites.bracket(plan("torch.add_", 3)) as bracket:
        y.add_(1)
        y.add_(1)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            y.add_(1)
        y.add_(1)
    assert y.tolist() == [3, 3]
    assert (bracket.fired, bracket.raised) == (1, caught.value)
    assert str(raised_at(caught.value)).startswith(("tests/faults/test_torch_ops.py:", __file__))


def test_counting_does_not_change_results() -> None:
    with Sites() as sites, sites.bracket(record=[TORCH]):
        result = torch.full((2,), 3, dtype=torch.int32).mul(2)
    assert result.dtype is torch.int32
    assert result.tolist() == [6, 6]


def test_the_mode_is_taken_off_after_an_exception() -> None:
    depth = torch._C._len_torch_function_stack()
    sites = Sites()
    with pytest.raises(InjectedFault), sites.bracket(plan("torch.clone")) as bracket:
        x.clone()
    assert torch._C._len_torch_function_stack() == depth
    x.clone()
    assert bracket.fired == 1


def test_no_mode_is_installed_when_seams_suffice() -> None:
    depth = torch._C._len_torch_function_stack()
    with Sites() as sites, sites.bracket(record=[SEAMS]):
        assert torch._C._len_torch_function_stack() == depth


class Metadata:
    def __init__(self) -> None:
        self.lens = torch.zeros(2)

    def prepare(self) -> None:
        self.lens = self.lens.clone()

    def restore(self) -> None:
        self.lens.copy_(self.lens)


def test_neither_listeners_nor_restore_code_nor_a_shelter_are_counted() -> None:
    metadata = Metadata()
    seen: list[Any] = []
    seams = [
        Seam("m.prepare", metadata, "prepare", None, before=lambda args, kwargs: seen.append(metadata.lens.tolist())),
        Seam("m.restore", metadata, "restore", SiteClass.RESTORE),
    ]
    with Sites(seams) as sites, sites.bracket(record=[TORCH]) as bracket:
        metadata.prepare()
        metadata.restore()
        with sites.shelter():
            torch.ones(3)
    assert seen == [[0, 0]]
    assert bracket.counts == {"torch.clone": 1}


def test_double_faults_reach_the_operations_of_restore_code() -> None:
    metadata = Metadata()
    sites = Sites([Seam("m.restore", metadata, "restore", SiteClass.RESTORE)])
    with pytest.raises(InjectedFault), sites, sites.bracket(plan("torch.copy_"), double=True):
        metadata.restore()


def test_an_owner_can_be_a_torch_module() -> None:
    model = torch.nn.Identity()
    before = dict(vars(model))
    sites = Sites([Seam("model.forward", model, "forward", SiteClass.LAUNCH)])
    with sites, sites.bracket(plan("model.forward", 2), [SEAMS]) as bracket:
        model(x)
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
    assert bracket.counts == {"model.forward": 2}
    assert vars(model) == before
