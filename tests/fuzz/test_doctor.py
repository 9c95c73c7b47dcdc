"""What a machine can test depends on what it has; each reason says what to do."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fuzz import doctor, engines
from fuzz.store import Store
from scenarios import UsageError
from tests.fuzz.conftest import Snapshot


def machine(
    monkeypatch: pytest.MonkeyPatch, *, torch: str | None, cuda: str | None = None, device: bool = False
) -> None:
    """Let this machine have that version of torch, with or without CUDA and a device."""

    def version(name: str) -> str:
        if torch is None:
            raise PackageNotFoundError(name)
        return torch

    def load(name: str, device: str) -> object:
        if torch is None:
            raise UsageError(f"--engine: {name!r} cannot be loaded here")
        return object()

    def nothing_there() -> list[object]:
        raise UsageError("tensorrt_llm is not installed and no checkout was named")

    fake = types.SimpleNamespace(
        __version__=torch,
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(is_available=lambda: device, get_device_name=lambda: "A GPU"),
    )
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "find_spec", lambda name: torch)
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(engines, "load", load)
    upstream(monkeypatch, nothing_there)
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.11.0")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)


def upstream(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], list[object]]) -> None:
    """Let the adapter to upstream's classes say this of them."""
    adapter = types.SimpleNamespace(doctor=answer)
    monkeypatch.setitem(sys.modules, "engines.tensorrt_llm", adapter)  # type: ignore[arg-type]
    monkeypatch.setattr("engines.tensorrt_llm", adapter, raising=False)


def text(rows: list[doctor.Row]) -> str:
    return "".join(f"{row['name']} {row['ok']} {row['summary']}\n" for row in rows)


def by_name(rows: list[doctor.Row], name: str) -> tuple[bool, str]:
    (row,) = (row for row in rows if row["name"] == name)
    return row["ok"], row["summary"]


def test_a_machine_with_everything_but_upstream(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot, tmp_path: Path
) -> None:
    machine(monkeypatch, torch="2.9.0", cuda="12.8", device=True)
    monkeypatch.setattr(sys, "version_info", (3, 12))
    rows = doctor.diagnose(Store(tmp_path / "home"))
    snapshot("doctor_gpu", text(rows))
    assert doctor.can_test(rows)


def test_a_machine_without_torch(monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot, tmp_path: Path) -> None:
    machine(monkeypatch, torch=None)
    monkeypatch.setattr(sys, "version_info", (3, 11))
    rows = doctor.diagnose(Store(tmp_path / "home"))
    snapshot("doctor_no_torch", text(rows))
    assert not doctor.can_test(rows)


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (None, "torch 2.9.0 is built without CUDA; --device cuda needs one with it"),
        ("12.8", "torch finds no CUDA device; see nvidia-smi"),
    ],
)
def test_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, reason: str, tmp_path: Path
) -> None:
    machine(monkeypatch, torch="2.9.0", cuda=cuda)
    rows = doctor.diagnose(Store(tmp_path / "home"))
    assert by_name(rows, "cuda") == (False, reason)
    assert doctor.can_test(rows)


def test_upstream_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, torch="2.9.0")
    upstream(
        monkeypatch,
        lambda: [("MTPEagleWorker", True, "post-fix", "eagle3.py"), ("PARDWorker", False, "pre-fix", "pard.py")],
    )
    rows = doctor.diagnose(Store(tmp_path / "home"))
    assert by_name(rows, "tensorrt_llm") == (True, "upstream's own classes:")
    assert by_name(rows, "  MTPEagleWorker") == (True, "post-fix (eagle3.py)")
    assert by_name(rows, "  PARDWorker") == (False, "pre-fix (pard.py)")
    # What upstream lacks is no fault of this machine.
    assert doctor.can_test(rows)


def test_a_state_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, torch="2.9.0")
    rows = doctor.diagnose(Store(Path("/proc/specfuzz")))
    ok, reason = by_name(rows, "state")
    assert not ok
    assert reason.startswith("SPECFUZZ_HOME: /proc/specfuzz cannot be written")
    assert not doctor.can_test(rows)


def test_a_campaign_that_was_cut_short_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.fuzz.samples import events

    machine(monkeypatch, torch="2.9.0")
    store = Store(tmp_path / "home")
    list(store.record(iter(events()[:2])))  # type: ignore[arg-type]
    _, summary = by_name(doctor.diagnose(store), "state")
    assert summary.endswith("0 findings, 10 scenarios in 1 campaign, 1 cut short or running")
