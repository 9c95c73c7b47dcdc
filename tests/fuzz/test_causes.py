"""Findings are grouped by what their scenarios violate together."""

from __future__ import annotations

from dataclasses import replace

from fuzz.causes import Cause, probable_causes
from fuzz.events import FindingFound
from tests.fuzz.samples import FINDING


def finding(invariant: str, *also: str) -> FindingFound:
    return FindingFound(finding=replace(FINDING, invariant=invariant), cases=1, also=also)


def ids(*found: FindingFound) -> tuple[str, ...]:
    return tuple(event.finding.id for event in found)


def test_two_slips_are_two_groups_though_both_spoil_the_drafts() -> None:
    stale_map = finding("req-idx-matches-layout", "drafts-equal-reference")
    leak = finding("saved-state-empty", "drafts-equal-reference")
    inputs = finding("inputs-equal-reference", "drafts-equal-reference", "req-idx-matches-layout")
    layout = finding("restored-layout", "saved-state-empty")
    tokens = finding("tokens-see-up-to-themselves", "req-idx-matches-layout")
    alone = finding("fault-surfaces")
    assert probable_causes([leak, inputs, stale_map, layout, alone, tokens]) == [
        Cause("req-idx-matches-layout", ids(stale_map, inputs, tokens)),
        Cause("saved-state-empty", ids(leak, layout)),
    ]


def test_of_two_that_explain_as_much_the_first_found_is_named() -> None:
    first, second = finding("restored-layout", "saved-state-empty"), finding("saved-state-empty", "restored-layout")
    assert probable_causes([second, first]) == [Cause("saved-state-empty", ids(second, first))]


def test_a_finding_by_itself_is_no_group() -> None:
    assert probable_causes([]) == []
    assert probable_causes([finding("restored-layout", "saved-state-empty")]) == []
    assert probable_causes([finding("restored-layout"), finding("saved-state-empty")]) == []
