"""The miniature source tree, written once per variant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.fixtures.tensorrt_llm_tree import LAYOUTS, build

Tree = Callable[..., Path]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """``tree(era, layout, metadata, **eras)`` is the directory of that variant."""
    built: dict[tuple[object, ...], Path] = {}

    def make(era: str = "settled", layout: str = LAYOUTS[0], metadata: str | None = None, **eras: str) -> Path:
        key = (era, layout, metadata, *sorted(eras.items()))
        if key not in built:
            built[key] = build(tmp_path_factory.mktemp("tree"), era, layout, metadata, **eras)
        return built[key]

    return make


@pytest.fixture(autouse=True)
def _no_source_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECFUZZ_TRTLLM_SOURCE", raising=False)
    monkeypatch.delenv("SPECFUZZ_TRTLLM_UNGUARDED", raising=False)
    monkeypatch.delenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", raising=False)
