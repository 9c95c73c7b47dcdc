"""Counting passages and raising the planned fault, once."""

from __future__ import annotations

import pytest

from faults import LINES, SEAMS, TORCH, Bracket, InjectedFault
from faults.bracket import Shelter
from scenarios import Fault, FaultKind, UsageError


def plan(site: str, occurrence: int) -> Fault:
    return Fault(site=site, occurrence=occurrence, kind=FaultKind.ERROR)


def passages(bracket: Bracket, family: str, site: str, times: int) -> list[int]:
    """Pass through a site; the 1-based passages that raised."""
    visit = bracket.visitor(family)
    assert visit is not None
    raised = []
    for i in range(1, times + 1):
        try:
            visit(site)
        except InjectedFault:
            raised.append(i)
    return raised


@pytest.mark.parametrize("record", [(), (TORCH,)], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("occurrence", [1, 2, 5])
def test_the_fault_strikes_at_its_occurrence_and_never_again(occurrence: int, record: tuple[str, ...]) -> None:
    bracket = Bracket(plan("torch.clone", occurrence), record)
    assert passages(bracket, TORCH, "torch.clone", 5) == [occurrence]
    assert bracket.fired == 1


@pytest.mark.parametrize("record", [(), (TORCH,)], ids=["unrecorded", "recorded"])
def test_other_sites_do_not_advance_the_plan(record: tuple[str, ...]) -> None:
    bracket = Bracket(plan("torch.clone", 2), record)
    assert passages(bracket, TORCH, "torch.cat", 5) == []
    assert passages(bracket, TORCH, "torch.clone", 1) == []
    assert (bracket.fired, bracket.raised) == (0, None)
    assert passages(bracket, TORCH, "torch.clone", 1) == [1]


def test_the_exception_that_was_raised_is_kept() -> None:
    bracket = Bracket(plan("torch.clone", 1))
    visit = bracket.visitor(TORCH)
    assert visit is not None
    with pytest.raises(InjectedFault) as caught:
        visit("torch.clone")
    assert bracket.raised is caught.value


def test_counts_are_the_passages_of_recorded_families_only() -> None:
    bracket = Bracket(plan("draft_model.forward", 9), (TORCH,))
    passages(bracket, TORCH, "torch.clone", 3)
    passages(bracket, TORCH, "torch.cat", 1)
    passages(bracket, SEAMS, "draft_model.forward", 2)
    assert bracket.counts == {"torch.clone": 3, "torch.cat": 1}


def test_the_passage_that_raises_is_counted() -> None:
    bracket = Bracket(plan("torch.clone", 2), (TORCH,))
    passages(bracket, TORCH, "torch.clone", 2)
    assert bracket.counts == {"torch.clone": 2}


@pytest.mark.parametrize(
    ("site", "record", "needed"),
    [
        (None, (), set()),
        (None, (SEAMS, LINES), {SEAMS, LINES}),
        ("torch.clone", (), {TORCH}),
        ("line:a.py:3", (SEAMS,), {SEAMS, LINES}),
    ],
)
def test_an_injector_is_needed_to_record_its_family_or_to_reach_the_fault(
    site: str | None, record: tuple[str, ...], needed: set[str]
) -> None:
    bracket = Bracket(plan(site, 1) if site else None, record)
    assert {name for name in (SEAMS, TORCH, LINES) if bracket.visitor(name)} == needed


@pytest.mark.parametrize("record", [(), (TORCH,)], ids=["unrecorded", "recorded"])
def test_a_sheltered_passage_neither_counts_nor_raises(record: tuple[str, ...]) -> None:
    shelter = Shelter()
    bracket = Bracket(plan("torch.clone", 1), record, shelter)
    with shelter:
        with shelter:
            assert passages(bracket, TORCH, "torch.clone", 1) == []
        assert passages(bracket, TORCH, "torch.clone", 1) == []
    assert bracket.counts == {}
    assert passages(bracket, TORCH, "torch.clone", 2) == [1]


def test_an_unknown_family_gets_the_closest_name() -> None:
    with pytest.raises(
        UsageError, match=r"^record: no family of fault sites is called 'seam'; did you mean 'seams'\?$"
    ):
        Bracket(None, ("seam",))
