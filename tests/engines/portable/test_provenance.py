"""Tags that follow rows: through tensor operations, through a right engine, and through one that mixes rows up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.portable.provenance import Misread, ProvenanceSession, misread_rows
from engines.portable.row_tags import UNTAGGED, RowTags
from museum import BUGS, seeded
from scenarios import Generation, Scenario, Step, check
from tests.invariants.cases import EAGLE, MTP, PARD, overlapped, ragged, ranked, served, started_up
from tests.museum.scenario_of import scenario_of

NONE = UNTAGGED
RIGHT = [served(EAGLE), started_up(PARD), overlapped(EAGLE), ranked(MTP)]


def _follow(operation: Any, *tagged: list[int]) -> list[Any]:
    """Tags of what an operation makes of tensors 10, 20, ... with these tags."""
    tags = RowTags()
    with tags:
        tensors = [torch.arange(1, len(given) + 1) * 10 for given in tagged]
        for tensor, given in zip(tensors, tagged, strict=True):
            tags.put(tensor, torch.tensor(given, dtype=torch.int32))
        result = operation(*tensors)
    found: list[Any] = tags.of(result).tolist()
    return found


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda a, b: a[torch.tensor([2, 0])], [9, 7]),
        (lambda a, b: torch.cat([b, a.flip(0)[:1]]), [7, 8, NONE, 9]),
        (lambda a, b: a.view(3, 1).expand(3, 2) + 1, [[7, 7], [8, 8], [9, 9]]),
        (lambda a, b: a + b, [7, 8, 9]),
        (lambda a, b: a + b.roll(1), [7, NONE, NONE]),
        (lambda a, b: a * torch.tensor([1, 0, 1]), [7, NONE, 9]),
        (lambda a, b: torch.where(torch.tensor([True, False, True]), a, -1), [7, NONE, 9]),
        (
            lambda a, b: torch.zeros(2, 3).index_copy(0, torch.tensor([1]), a.view(1, 3).float()),
            [[NONE] * 3, [7, 8, 9]],
        ),
        (lambda a, b: torch.zeros(3, 40).scatter_(1, a.view(3, 1), 1.0).argmax(dim=-1), [7, 8, 9]),
        (lambda a, b: torch.stack([a, b]).sum(dim=0), [7, 8, 9]),
        (lambda a, b: a.cumsum(0), [NONE] * 3),
        (lambda a, b: a.copy_(b.roll(1)), [NONE, 7, 8]),
        (lambda a, b: a.fill_(3), [NONE] * 3),
        (lambda a, b: torch.nn.functional.pad(a, (1, 0)), [NONE, 7, 8, 9]),
    ],
)
def test_tags_go_where_elements_go(operation: Any, expected: list[Any]) -> None:
    assert _follow(operation, [7, 8, 9], [7, 8, NONE]) == expected


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("scenario", RIGHT, ids=lambda scenario: scenario.config.worker)
def test_a_right_engine_reads_each_row_as_its_own_request_s(scenario: Scenario) -> None:
    assert misread_rows(scenario) == []


def test_drafts_belong_to_the_generation_that_verifies_them_however_many_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners: list[list[int]] = []

    def look(self: Any, substep: str, field: str, tensor: Any, of_rows: Any) -> None:
        if field == "draft_tokens":
            owners.append(list(of_rows))

    monkeypatch.setattr(ProvenanceSession, "_look", look)
    scenario = ragged(EAGLE)
    prefill = next(step for step in scenario.steps if step.contexts)
    widths = Generation(request=0, verify=1), Generation(request=1, verify=3)
    misread_rows(check(replace(scenario, steps=(prefill, Step(draft_len=3, generations=widths)))))
    assert owners == [[], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("bug", "first"),
    [
        # A row of the step in flight.
        ("TRT-24/Eagle3OneModelWorker/in-flight", "steps[5] prepared: row 4 of input_ids (request 1) was read as {}"),
        # Slots of a worker that are written by row.
        ("SGL-06/MTPWorker/history", "steps[1] restored: row 0 of mtp_past_tokens_pool (request 1) was read as {}"),
        ("TRT-110/Eagle3OneModelWorker/contexts", "steps[1] restored: row 0 of text (request 1) was read as {}"),
    ],
)
def test_a_row_of_another_request_is_named(bug: str, first: str) -> None:
    with seeded(bug):
        rows = misread_rows(scenario_of(BUGS[bug]))
    assert str(rows[0]) == first.format("request 0's")


def test_a_dummy_is_called_one() -> None:
    row = Misread(step=2, substep="draft[1]", field="input_ids", row=3, request=1, owner=None)
    assert str(row) == "steps[2] draft[1]: row 3 of input_ids (a dummy) was read as request 1's"
