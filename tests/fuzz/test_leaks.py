"""What failed steps leave behind is dead, as docs/leaks.md has it; what is read first is a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuzz import cli
from scenarios import WORKERS

PAGE = (Path(__file__).parents[2] / "docs" / "leaks.md").read_text()


def rows(text: str, worker: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith(f"{worker} ")]


def enders(text: str) -> set[tuple[str, str]]:
    """Fields, each with a function that ends what is left in it."""
    lines = [line.partition(": ") for line in text.splitlines() if line.endswith("(rewritten)")]
    return {(field, end) for field, _, ends in lines for end in ends.split(", ")}


def test_an_engine_without_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["leaks", "--engine", "tests.fuzz.fakes:Sound", "--worker", "PARDWorker"]) == 2
    assert "--engine: 'fake' has no attn_metadata in its session that could be watched" in capsys.readouterr().err
    assert cli.invoke(["leaks", "--faults", "none"]) == 2
    assert "--faults: without a family nothing can fail; write for instance 'seams'" in capsys.readouterr().err


def test_the_page_knows_all_workers_and_nothing_live() -> None:
    assert all(len(rows(PAGE, worker)) == 3 for worker in WORKERS)
    assert ", 0 of them live" in PAGE


@pytest.mark.exhaustive(every=10, first=3)
@pytest.mark.parametrize("worker", WORKERS)
def test_the_page_is_right(worker: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the portable engine needs torch")
    assert cli.invoke(["leaks", "--worker", worker]) == 0
    shown = capsys.readouterr().out
    assert rows(shown, worker) == rows(PAGE, worker)
    assert enders(shown) <= enders(PAGE)


@pytest.mark.exhaustive
def test_what_is_read_first_is_live(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the portable engine needs torch")
    from engines.portable.attention.backends.trtllm import TrtllmAttentionMetadata

    update = TrtllmAttentionMetadata.update_spec_dec_param

    def too_curious(self: Any, *args: Any, **kwargs: Any) -> None:
        assert self.use_spec_decoding in (True, False)
        update(self, *args, **kwargs)

    monkeypatch.setattr(TrtllmAttentionMetadata, "update_spec_dec_param", too_curious)
    assert cli.invoke(["leaks", "--worker", "Eagle3OneModelWorker", "--json"]) == 1
    left = [one["left"] for one in json.loads(capsys.readouterr().out)]
    (verdict,) = {fields["use_spec_decoding"]["verdict"] for fields in left if "use_spec_decoding" in fields}
    assert verdict == "live"
    assert {fields["kv_lens_cuda"]["verdict"] for fields in left if "kv_lens_cuda" in fields} == {"dead"}
