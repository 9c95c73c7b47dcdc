"""Names and classes of sites."""

from __future__ import annotations

import pytest

from faults import (
    DEFAULT_CLASSES,
    LINES,
    SEAMS,
    TORCH,
    SiteClass,
    family,
    line_site,
    parse_line_site,
    torch_class,
    torch_site,
)
from scenarios import ScenarioError


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("draft_model.forward", SEAMS),
        ("torchlike.forward", SEAMS),
        ("torch.clone", TORCH),
        ("line:engines/portable/speculative/pard.py:12", LINES),
    ],
)
def test_the_name_tells_the_family(site: str, expected: str) -> None:
    assert family(site) == expected


@pytest.mark.parametrize(
    ("function", "site"),
    [
        ("clone", "torch.clone"),
        ("add_", "torch.add_"),
        ("__setitem__", "torch.setitem"),
        ("__rsub__", "torch.rsub"),
        ("add.Tensor", "torch.add"),
        ("_foreach_add_", "torch._foreach_add_"),
    ],
)
def test_torch_sites_are_named_after_the_function(function: str, site: str) -> None:
    assert torch_site(function) == site


def test_line_sites_round_trip() -> None:
    site = line_site("speculative/eagle3.py", 120)
    assert site == "line:speculative/eagle3.py:120"
    assert parse_line_site(site) == ("speculative/eagle3.py", 120)
    assert parse_line_site("line:C:/eagle3.py:120") == ("C:/eagle3.py", 120)


@pytest.mark.parametrize(
    "site", ["torch.clone", "line:", "line:a.py", "line::3", "line:a.py:x", "line:a.py:-1", "a.py:3"]
)
def test_what_names_no_line_is_refused(site: str) -> None:
    with pytest.raises(ScenarioError, match="write line:PATH:NUMBER") as caught:
        parse_line_site(site)
    assert caught.value.field == "fault.site"


def test_only_restore_code_is_left_out_by_default() -> None:
    assert set(SiteClass) - DEFAULT_CLASSES == {SiteClass.RESTORE}


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("torch.clone", SiteClass.ALLOC),
        ("torch.getitem", SiteClass.ALLOC),
        ("torch.add_", SiteClass.LAUNCH),
        ("torch.setitem", SiteClass.LAUNCH),
        ("torch.item", SiteClass.ASYNC),
        ("torch.cpu", SiteClass.ASYNC),
    ],
)
def test_torch_sites_have_a_class(site: str, expected: SiteClass) -> None:
    assert torch_class(site) is expected
