"""Command-line values: what is accepted, and what the error says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fuzz import options
from fuzz.engines import workers
from museum import Bug
from scenarios import WORKERS, UsageError


def test_workers_by_any_casing() -> None:
    assert options.workers([]) == ()
    assert options.workers(["pardworker", "MTPEAGLEWORKER", "PARDWorker"]) == ("PARDWorker", "MTPEagleWorker")
    with pytest.raises(UsageError, match=r"^--worker: no worker is called 'PARD'; did you mean 'PARDWorker'\?$"):
        options.workers(["PARD"])


def test_invariants_by_slug() -> None:
    assert options.invariants([]) == ()
    assert options.invariants(["Output-Lossless", "output-lossless"]) == ("output-lossless",)
    with pytest.raises(UsageError, match=r"^--invariant: no invariant is called 'lossless'; did you mean"):
        options.invariants(["lossless"])


@pytest.mark.parametrize(
    ("text", "families"),
    [("none", ()), ("seams", ("seams",)), ("torch, SEAMS", ("torch", "seams")), ("seams,seams", ("seams",))],
)
def test_families_of_fault_sites(text: str, families: tuple[str, ...]) -> None:
    assert options.families(text) == families


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("seam", "--faults: no family of fault sites is called 'seam'; did you mean 'seams'?"),
        ("seams,none", "--faults: 'none' excludes the others; write it alone or leave it out"),
        ("", "--faults: no family of fault sites is called ''; write one of lines, none, seams, torch"),
    ],
)
def test_families_that_make_no_sense(text: str, error: str) -> None:
    with pytest.raises(UsageError) as caught:
        options.families(text)
    assert str(caught.value) == error


def test_lines_need_a_newer_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12))
    assert options.families("lines") == ("lines",)
    monkeypatch.setattr(sys, "version_info", (3, 11))
    with pytest.raises(UsageError, match=r"^--faults: 'lines' needs Python 3.12 or newer"):
        options.families("lines")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("0.5s", 0.5), ("10m", 600.0), ("1h30m", 5400.0), (" 1h0m5s ", 3605.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert options.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "ten", "5d", "m", "-5s", "1m1h", "1.5m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--max-time: .* is not a duration; write for instance 90s, 10m or 1h30m$"):
        options.duration(text)


@pytest.mark.parametrize("text", ["721h", "999999999h", "31536000s"])
def test_durations_that_are_too_long(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--max-time: .* is more than 30 days; write at most 720h$"):
        options.duration(text)


def test_folders_and_files(tmp_path: Path) -> None:
    assert options.folder("--report-dir", None) is options.file("--output", None) is None
    assert options.folder("--report-dir", str(tmp_path / "new")) == tmp_path / "new"
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    assert options.file("--output", str(tmp_path / "file")) == tmp_path / "file"
    assert options.file("--output", str(tmp_path / "new" / "file")) == tmp_path / "new" / "file"
    with pytest.raises(UsageError, match=r"^--report-dir: is empty; name a folder$"):
        options.folder("--report-dir", "")
    with pytest.raises(UsageError, match=r"^--report-dir: .*/file cannot be written"):
        options.folder("--report-dir", str(tmp_path / "file"))
    # What is there would be replaced.
    for text in ("", str(tmp_path), "/dev/null"):
        with pytest.raises(UsageError, match=rf"^--output: '{text}' is not a file; name one"):
            options.file("--output", text)


def test_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert options.processes(None, 4) == 4
    assert options.processes(None, 40) == 8
    assert options.processes(12, 4) == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert options.processes(None, 4) == 1
    with pytest.raises(UsageError, match=r"^--workers: 0 is too small; write 1 or more$"):
        options.processes(0, 4)
    with pytest.raises(UsageError, match=r"^--workers: 257 is too large; write at most 256$"):
        options.processes(257, 4)


def test_bugs_by_id_or_museum_entry(empty_museum: dict[str, Bug]) -> None:
    ids = ("TRT-01/PARDWorker", "TRT-01/MTPEagleWorker", "TRT-04/MTPEagleWorker")
    for id in ids:
        empty_museum[id] = Bug(id, "K2", id.partition("/")[2], "t", "r", (), lambda patch: None)
    assert options.bugs([]) == ids
    assert options.bugs(["trt-01"]) == ids[:2]
    assert options.bugs(["trt-04/mtpeagleworker", "TRT-01"]) == (ids[2], *ids[:2])
    variant = f"{ids[0]}/variant"
    empty_museum[variant] = Bug(variant, "K2", ids[0].partition("/")[2], "t", "r", (), lambda patch: None)
    assert options.bugs([ids[0]]) == (ids[0], variant)
    with pytest.raises(
        UsageError, match=r"^--bug: no defect is called 'TRT-04/Eagle'; write one of TRT-04/MTPEagleWorker$"
    ):
        options.bugs(["TRT-04/Eagle"])
    assert options.bug("trt-01/pardworker", "--with-bug", "PARDWorker") == ids[0]
    assert options.bug("TRT-01", "--with-bug", "MTPEagleWorker") == ids[1]
    with pytest.raises(UsageError, match=r"^--with-bug: 'TRT-01' may be any of TRT-01/PARDWorker, TRT-01/PARDWorker/v"):
        options.bug("TRT-01", "--with-bug", "PARDWorker")
    for name in ("trt-04", "TRT-04/MTPEagleWorker"):
        with pytest.raises(
            UsageError, match=rf"^--with-bug: {name} is a defect of MTPEagleWorker, not of PARDWorker; "
        ):
            options.bug(name, "--with-bug", "PARDWorker")


def test_a_target_is_checked() -> None:
    good = {
        "engine": "portable",
        "device": "cpu",
        "worker": None,
        "invariant": None,
        "faults": "seams",
        "max_draft_len": None,
        "seed": 0,
    }
    assert options.target(**good).workers == tuple(WORKERS)  # type: ignore[arg-type]
    assert options.target(**{**good, "engine": "tensorrt_llm"}).workers == workers("tensorrt_llm")  # type: ignore[arg-type]
    for field, value, error in (
        ("engine", "portible", "--engine: no engine is called 'portible'; did you mean 'portable'?"),
        ("device", "gpu", "--device: no device is called 'gpu'; write cpu or cuda"),
        ("max_draft_len", 0, "--max-draft-len: 0 is outside 1..31; write a value in that range"),
        ("max_draft_len", 32, "--max-draft-len: 32 is outside 1..31; write a value in that range"),
        ("seed", -1, "--seed: -1 is too small; write 0 or more"),
    ):
        with pytest.raises(UsageError) as caught:
            options.target(**{**good, field: value})  # type: ignore[arg-type]
        assert str(caught.value) == error
