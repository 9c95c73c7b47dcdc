"""What this machine can test, and why not."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import fuzz.engines
from fuzz.report import counted
from fuzz.store import Store
from scenarios import UsageError

Row = dict[str, Any]


def diagnose(store: Store) -> list[Row]:
    """One row per thing that a campaign may need: its name, whether it is there, and what that means."""
    return [_python(), _torch(), _cuda(), _monitoring(), _engine(), *_tensorrt_llm(), _state(store)]


def can_test(rows: list[Row]) -> bool:
    """Whether at least the portable engine runs and its findings can be kept."""
    return all(row["ok"] for row in rows if row["name"] in ("python", "torch", "portable", "state"))


def _row(name: str, ok: bool, summary: str) -> Row:
    return {"name": name, "ok": ok, "summary": summary}


def _python() -> Row:
    text = f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"
    return _row("python", sys.version_info >= (3, 10), text)


def _torch() -> Row:
    try:
        return _row("torch", True, version("torch"))
    except PackageNotFoundError:
        return _row("torch", False, "not installed, and the portable engine needs it: pip install 'specfuzz[torch]'")


def _cuda() -> Row:
    if find_spec("torch") is None:
        return _row("cuda", False, "needs torch")
    import torch

    if torch.version.cuda is None:
        return _row("cuda", False, f"torch {torch.__version__} is built without CUDA; --device cuda needs one with it")
    if not torch.cuda.is_available():
        return _row("cuda", False, "torch finds no CUDA device; see nvidia-smi")
    return _row("cuda", True, f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")


def _monitoring() -> Row:
    if sys.version_info >= (3, 12):
        return _row("sys.monitoring", True, "faults can strike at source lines: --faults lines")
    return _row("sys.monitoring", False, "--faults lines needs Python 3.12 or newer")


def _engine() -> Row:
    try:
        fuzz.engines.load(fuzz.engines.PORTABLE, "cpu")
    except UsageError as error:
        return _row("portable", False, str(error))
    return _row("portable", True, "the engine that the suite brings")


def _tensorrt_llm() -> list[Row]:
    """One row for the engine, and one for each class of upstream that was looked for or found."""
    try:
        from engines import tensorrt_llm

        classes = tensorrt_llm.doctor()
    except (ImportError, UsageError) as error:
        return [_row(fuzz.engines.TENSORRT_LLM, False, str(error))]
    rows = [_row(f"  {name}", drivable, f"{reason} ({where})") for name, drivable, reason, where in classes]
    return [_row(fuzz.engines.TENSORRT_LLM, True, "upstream's own classes:"), *rows]


def _state(store: Store) -> Row:
    try:
        store.prepare()
        totals = store.totals()
        findings, interrupted = len(store.findings()), len(store.interrupted())
    except UsageError as error:
        return _row("state", False, str(error))
    text = f"{store.home}: {counted(findings, 'finding')}, {counted(totals.cases, 'scenario')}"
    text += f" in {counted(totals.campaigns, 'campaign')}"
    text += f", {totals.unfinished} cut short or running" if totals.unfinished else ""
    return _row("state", True, text + (f", {counted(interrupted, 'case')} interrupted" if interrupted else ""))
