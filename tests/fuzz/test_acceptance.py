"""Acceptance by depth: flat with a sound engine, and what a stale map makes of it (PR #17240)."""

from __future__ import annotations

import json

import pytest

from fuzz import cli
from fuzz.acceptance import Acceptance, lines

Capture = pytest.CaptureFixture[str]
pytest.importorskip("torch", reason="the portable engine needs torch")


def test_rates_are_conditional() -> None:
    cell = Acceptance(2, 3, (10, 8, 4), (8, 4, 0))
    assert cell.rates == [0.8, 0.5, 0.0]
    assert cell.length == 2.2
    assert Acceptance(1, 2, (5, 0), (0, 0)).rates == [0.0, None]
    head, row = lines([("as it is", cell)])
    assert head.split() == ["engine", "batch", "K", "depth", "1", "depth", "2", "depth", "3", "length"]
    assert row.split() == ["as", "it", "is", "2", "3", "0.800", "0.500", "0.000", "2.20"]


@pytest.mark.exhaustive
def test_a_stale_map_costs_acceptance_with_each_depth_and_only_in_a_batch(capsys: Capture) -> None:
    asked = ["acceptance", "--with-bug", "TRT-12", "--drafts", "48", "--agreement", "1", "--json"]
    assert cli.invoke(asked) == 0
    rows = json.loads(capsys.readouterr().out)
    rates = {(row["engine"] == "as it is", row["batch"], row["draft_len"]): row["rates"] for row in rows}
    flat = {key: cell for key, cell in rates.items() if key != (False, 8, 4)}
    assert all(set(cell) == {1.0} for cell in flat.values())
    # Of eight requests the first alone finds itself in the map.
    first, second, *later = rates[False, 8, 4]
    assert (first, second) == (1.0, 0.125)
    assert set(later) == {1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1,x"], "--batch: '1,x' is no list of whole numbers"),
        (["--draft-len", "0"], "--draft-len: 0 is too small"),
        (["--drafts", "0"], "--drafts: 0 is too small"),
        (["--agreement", "1.5"], "--agreement: 1.5 is no probability"),
        (["--attention-backend", "DSX"], "--attention-backend: no attention backend is called 'DSX'"),
        (["--engine", "tensorrt_llm", "--with-bug", "TRT-12"], "--with-bug: defects are seeded into the portable"),
    ],
)
def test_bad_input(capsys: Capture, options: list[str], message: str) -> None:
    assert cli.invoke(["acceptance", *options]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert not out
