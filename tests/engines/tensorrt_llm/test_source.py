"""Finding upstream's files, and saying what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.tensorrt_llm.source import find, open_source
from scenarios import UsageError
from tests.fixtures.tensorrt_llm_tree import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_told_from_the_files(tree, layout):
    source = open_source(tree("settled", layout))
    assert source.layout == layout
    assert source.attention_file.parts[-3:][-len(layout.split(".")) - 1 :] == (*layout.split("."), "interface.py")


def test_classes_are_found_without_importing_anything(tree):
    classes = open_source(tree()).classes
    assert classes["PARDWorker"] == "tensorrt_llm._torch.speculative.pard"
    assert classes["MTPEagleWorker"] == "tensorrt_llm._torch.speculative.eagle3"


def test_nothing_to_drive_is_one_sentence_that_says_what_to_do():
    with pytest.raises(UsageError) as error:
        find()
    assert "install tensorrt_llm" in str(error.value)
    assert "SPECFUZZ_TRTLLM_SOURCE" in str(error.value)


def test_the_environment_names_the_checkout(tree, monkeypatch):
    monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", str(tree()))
    assert find().root == tree().resolve()


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("tensorrt_llm", "no tensorrt_llm/_torch"),
        ("tensorrt_llm/_torch/attention/backends/interface.py", "interface.py"),
        ("tensorrt_llm/_torch/speculative/interface.py", "speculative/interface.py is missing"),
    ],
)
def test_an_incomplete_checkout_is_refused_by_name(tmp_path: Path, missing, text):
    from tests.fixtures.tensorrt_llm_tree import build

    root = build(tmp_path)
    (root / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=text):
        open_source(root)
