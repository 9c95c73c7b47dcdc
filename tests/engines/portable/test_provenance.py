"""Tags that follow rows through a right engine, and through one that mixes rows up."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.portable.provenance import Misread, ProvenanceSession, misread_rows
from engines.portable.session import PortableSession
from museum import BUGS, seeded
from scenarios import Generation, Scenario, Step, check
from tests.invariants.cases import EAGLE, MTP, PARD, failing, overlapped, ragged, ranked, served, started_up
from tests.museum.scenario_of import scenario_of

RIGHT = [served(EAGLE), started_up(PARD), overlapped(EAGLE), ranked(MTP)]


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("scenario", RIGHT, ids=lambda scenario: scenario.config.worker)
def test_a_right_engine_reads_each_row_as_its_own_request_s(scenario: Scenario) -> None:
    assert misread_rows(scenario) == []


def test_an_engine_does_the_same_when_its_rows_are_watched() -> None:
    scenario, traces = failing(EAGLE), []
    for kind in (PortableSession, ProvenanceSession):
        session = kind(scenario.config, scenario.requests, torch.device("cpu"), observe=True, record=())
        with closing(session):
            session.foresee(scenario.steps)
            for step in scenario.steps:
                session.step(step)
            traces.append(session.trace())
    assert traces[0] == traces[1]


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
        (
            "TRT-24/Eagle3OneModelWorker/in-flight",
            "steps[5] prepared: row 4 of input_ids (request 1) was read as request 0's",
        ),
        # Slots of a worker that are written by row.
        (
            "SGL-06/MTPWorker/history",
            "steps[1] restored: row 0 of mtp_past_tokens_pool (request 1) was read as request 0's",
        ),
        # What follows from the text of another slot.
        (
            "TRT-110/Eagle3OneModelWorker/contexts",
            "steps[1] restored: row 1 of next_draft_tokens (request 2) was read as request 1's",
        ),
        # Rows that are looked up by an old map from tokens to requests.
        (
            "TRT-12/Eagle3OneModelWorker",
            "steps[0] draft[2]: row 1 of hidden_states (request 0) was read as request 1's",
        ),
    ],
)
def test_a_row_of_another_request_is_named(bug: str, first: str) -> None:
    with seeded(bug):
        rows = misread_rows(scenario_of(BUGS[bug]))
    assert str(rows[0]) == first


def test_a_dummy_is_called_one() -> None:
    row = Misread(step=2, substep="draft[1]", field="input_ids", row=3, request=1, owner=None)
    assert str(row) == "steps[2] draft[1]: row 3 of input_ids (a dummy) was read as request 1's"
