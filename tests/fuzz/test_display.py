"""Progress is for a person at a terminal; the events pass through unchanged for everybody."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fuzz.display import coloured, escaped, watch
from fuzz.events import CampaignStarted, Event, Events
from tests.fuzz.samples import FINDING, FOUND, events


def stream(all_events: list[Event], closed: list[bool]) -> Events:
    try:
        yield from all_events
    finally:
        closed.append(True)


def shown(all_events: list[Event], *, terminal: bool) -> str:
    file, closed = io.StringIO(), []
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    assert list(watch(stream(all_events, closed), console)) == all_events  # type: ignore[arg-type]
    assert closed == [True]
    return file.getvalue()


def test_a_terminal_sees_progress_and_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    text = shown(events(FOUND), terminal=True)
    assert f"{FINDING.id}  restored-layout" in text
    assert "20 scenarios  1 findings" in text
    assert "run" in text


def test_a_campaign_by_time_progresses_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    start = CampaignStarted(command="fuzz", engine="e", device="cpu", workers=(), seed=0, seconds=0.001)
    text = shown([start, *events()[1:]], terminal=True)
    assert "fuzz" in text
    assert "20 scenarios" in text


def test_nobody_else_sees_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert shown(events(FOUND), terminal=False) == ""
    monkeypatch.setenv("CI", "1")
    assert shown(events(FOUND), terminal=True) == ""


def test_whoever_stops_listening_ends_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    for terminal in (True, False):
        closed: list[bool] = []
        watched = watch(stream(events(), closed), Console(file=io.StringIO(), force_terminal=terminal))
        next(watched)
        watched.close()
        assert closed == [True]


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    assert coloured()
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()


def test_nothing_steers_the_terminal() -> None:
    assert escaped("a\x1b[2J\nb\u202e é") == "a\\x1b[2J\\nb\\u202e é"
