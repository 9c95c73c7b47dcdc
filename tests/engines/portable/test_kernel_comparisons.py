"""What the comparisons of kernels build is what the engine takes, also where no kernel can run."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the comparisons need torch")

from engines import kernels
from tests.kernel_comparisons import COMPARISONS, Comparison

ROOT = Path(kernels.__file__).parent
all_comparisons = pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.__name__)


class Asked(Exception):
    """A kernel was to be launched."""


class Missing:
    """In the place of the module of kernels, any of which says its name instead of running."""

    INTERPRETED = True

    def __getattr__(self, name: str) -> Any:
        raise Asked(name)


def kernel_names() -> set[str]:
    """Public functions of the module of kernels, which cannot be imported without Triton."""
    module = ast.parse((ROOT / "triton_kernels.py").read_text())
    functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    return {name for name in functions if not name.startswith("_")} - {"warm_up"}


@all_comparisons
def test_torch_is_equal_to_itself(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is chosen and does not interpret, a CPU has torch's kernels."""
    monkeypatch.setattr(kernels, "_load", lambda: SimpleNamespace(INTERPRETED=False))
    comparison("cpu")


def test_every_kernel_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_load", Missing)
    asked = set()
    for comparison in COMPARISONS:
        with pytest.raises(Asked) as kernel:
            comparison("cpu")
        asked.add(str(kernel.value))
    assert asked == kernel_names()
