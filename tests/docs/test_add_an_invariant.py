"""The invariant of the page can be registered, and judges; a module that holds one is imported."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import invariants
import reference
from invariants import find, registry, verify
from tests.fuzz.fakes import edit
from tests.fuzz.samples import MIXED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/add-an-invariant.md").read_text()
SLUG = "draft-ids-in-vocabulary"


def test_the_page_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTER", dict(registry._REGISTER))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "page", "exec"), {})
    assert find(SLUG).statement == "Every draft is a token of the vocabulary."
    sound = reference.trace(MIXED)
    verdict = verify(MIXED, lambda _: sound, only=(SLUG,))
    assert verdict.counts[SLUG][0] > 0
    assert verdict.violations == ()
    *before, last = sound.steps
    broken = replace(sound, steps=(*before, edit(last, "restored", next_draft_tokens=[[0], [-1]])))
    assert [v.field for v in verify(MIXED, lambda _: broken, only=(SLUG,)).violations] == ["next_draft_tokens"]


def test_each_module_that_registers_is_imported() -> None:
    """As the page says: nobody imports one that is not in this list."""
    assert "_CAUSES_FIRST" in PAGE
    registers = {
        path.stem
        for path in (ROOT / "invariants").glob("*.py")
        if re.search(r"^@(invariant|relation)\(", path.read_text(), re.MULTILINE)
    }
    assert registers == set(invariants._CAUSES_FIRST)
